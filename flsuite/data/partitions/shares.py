"""Equal mixes, a few classes per client, unequal sizes, and owners as clients."""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator

from flsuite.common.arguments import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)
from flsuite.common.errors import FlsuiteError
from flsuite.data.partitions.base import Array, AssignedPartition, CountPartition, apportion


class IID(CountPartition):
    """A random split into clients of nearly equal size (McMahan et al. 2017, arXiv:1602.05629).

    Take it as the case without any difference between clients.

    Sizes differ by at most one.
    """

    needs_labels = False

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        counts = np.full((1, clients), sizes[0] // clients)
        counts[0, : sizes[0] % clients] += 1
        return counts


@dataclass
class Pathological(CountPartition):
    """``classes_per_client`` classes per client, every class split evenly over its clients.

    Take it as the hardest case: a few classes per client.

    After McMahan et al. 2017 (arXiv:1602.05629), with classes instead of shards, so each client has
    exactly the requested number of classes. Classes are assigned from one random permutation after
    another, so the numbers of clients of any two classes differ by at most one. With fewer than
    ``classes / classes_per_client`` clients, the samples of some classes stay unused. A class with
    fewer samples than clients reaches only some of them.

    Args:
        classes_per_client: From 1 to the number of classes in the training data.

    Raises:
        FlsuiteError: If there are fewer classes than ``classes_per_client``, or classes so small
            that a client would have no sample.
    """

    classes_per_client: PositiveInt

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        holds = assign_classes("Pathological", len(sizes), clients, self.classes_per_client, rng)
        counts = _split_classes(sizes, holds, rng)
        empty = np.flatnonzero(counts.sum(axis=0) == 0)
        if len(empty):
            raise FlsuiteError(
                f"client {empty[0]} would have no sample: its classes have fewer samples than "
                "clients; raise Pathological.classes_per_client or lower data.clients"
            )
        return counts


def assign_classes(
    owner: str, classes: int, clients: int, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the classes that each client has, bool ``(classes, clients)``.

    Raises:
        FlsuiteError: If there are fewer classes than ``per_client``. The message names the owner.
    """
    if per_client > classes:
        raise FlsuiteError(
            f"{owner}.classes_per_client is {per_client}, "
            f"but the training data has {classes} classes; lower it"
        )

    holds = np.zeros((classes, clients), dtype=bool)
    remaining = rng.permutation(classes)
    for client in range(clients):
        own, remaining = remaining[:per_client], remaining[per_client:]
        if missing := per_client - len(own):
            # The rest comes from a new permutation, without the client's current classes.
            permutation = rng.permutation(classes)
            added = permutation[~np.isin(permutation, own)][:missing]
            remaining = permutation[~np.isin(permutation, added)]
            own = np.concatenate([own, added])
        holds[own, client] = True

    return holds


def _split_classes(sizes: np.ndarray, holds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the samples per class and client, int64 ``(classes, clients)``.

    Each class is split evenly. Its remainder goes to the clients with the fewest samples so far,
    and the classes with the smallest shares come last, so no client stays empty if that can be
    avoided.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    shares = sizes // np.maximum(holds.sum(axis=1), 1)
    for k in np.argsort(-shares, kind="stable"):
        holders = rng.permutation(np.flatnonzero(holds[k]))
        if len(holders):
            share, extra = divmod(int(sizes[k]), len(holders))
            counts[k, holders] = share
            # The stable sort keeps the random order of the holders on a tie.
            poorest = holders[np.argsort(counts[:, holders].sum(axis=0), kind="stable")]
            counts[k, poorest[:extra]] += 1

    return counts


@dataclass
class QuantitySkew(CountPartition):
    """IID classes and skewed sizes.

    Take it to see what sizes alone change.

    Every client first gets ``min_samples``. The rest is shared in proportion to one random weight
    per client. Li et al. 2022 (arXiv:2102.02079) draw the sizes from a Dirichlet distribution. All
    samples are used.

    Args:
        distribution: The distribution of the weights: ``lognormal`` (``exp(sigma * z)`` with
            standard normal z) or ``dirichlet``.
        sigma: Spread of the lognormal, at least 0. With 0, sizes differ by at most one.
        alpha: Concentration of the Dirichlet, above 0. A smaller value gives more unequal sizes.
        min_samples: Minimum number of samples per client, at least 1.
    """

    needs_labels = False

    distribution: Literal["lognormal", "dirichlet"] = "lognormal"
    sigma: NonNegativeFloat = 1.0
    alpha: PositiveFloat = 0.5
    min_samples: PositiveInt = 1

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        if self.distribution == "lognormal":
            exponent = self.sigma * rng.standard_normal(clients)
            weights = np.exp(exponent - exponent.max())  # at most 1, to prevent overflow
            weights /= weights.sum()
        else:
            weights = rng.dirichlet(np.full(clients, self.alpha))

        # The rest of the samples is shared like a class in Dirichlet.
        rest = sizes - self.min_samples * clients
        return self.min_samples + apportion(weights[None], rest, rng)


@dataclass
class Ranked(AssignedPartition, Settings):
    """Samples are ranked by their class plus noise, and cut into clients of equal size.

    Take it for grades and regression, where neighbors are alike.

    For an ordered property, such as a grade, or the target of a regression in ``data.bins``.
    Without noise, each client has a few neighboring classes. Much noise approaches IID. Clients are
    numbered at random, not by rank.

    Args:
        noise: Standard deviation of the noise, as a fraction of the range of the classes.
    """

    noise: NonNegativeFloat = 0.0

    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        spread = self.noise * max(np.ptp(labels), 1)
        # A second random key, so that equal classes are not ranked by their order in the file.
        noisy = labels + spread * rng.standard_normal(len(labels))
        order = np.lexsort((rng.random(len(labels)), noisy))
        owners = np.empty(len(labels), dtype=np.int64)
        cuts = np.linspace(0, len(labels), clients + 1).round().astype(np.int64)
        owners[order] = np.repeat(rng.permutation(clients), np.diff(cuts))
        return owners


class Natural(AssignedPartition):
    """Each owner in the data (a writer, a device) is a client, as in FEMNIST.

    Take it if the data has owners: this is the most realistic split.

    This is the split of LEAF (Caldas et al. 2018, arXiv:1812.01097). With as many owners as
    clients, client i is the i-th owner in ascending order, and nothing is random. With more owners,
    whole owners are grouped: shuffled, then assigned from the largest to the smallest, each to the
    currently smallest group (ties go to the lower number). The groups are then nearly equal in
    size. No owner is ever split between clients.

    Raises:
        FlsuiteError: If the dataset has no owners, or fewer of them than ``clients``.
    """

    needs_labels = False

    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        if ids is None:
            raise FlsuiteError(
                "the dataset has no natural owners for the Natural partition; "
                "choose another data.partition"
            )
        _, owner, sizes = np.unique(ids, return_inverse=True, return_counts=True)
        if len(sizes) < clients:
            raise FlsuiteError(
                f"{len(sizes)} natural owners cannot make {clients} clients; lower data.clients"
            )

        client_of = np.arange(clients) if len(sizes) == clients else _group(sizes, clients, rng)
        return client_of[owner]


def _group(sizes: np.ndarray, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Return the group of each owner, int64 ``(owners,)``."""
    # Owners of equal size are in random order, because the sort below is stable.
    shuffled = rng.permutation(len(sizes))
    group_of = np.empty(len(sizes), dtype=np.int64)
    # Entries are (samples, group), so ties go to the lower number.
    heap = [(0, group) for group in range(groups)]
    for owner in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        total, group = heap[0]
        group_of[owner] = group
        heapq.heapreplace(heap, (total + int(sizes[owner]), group))
    return group_of


@dataclass
class SoleOwner(AssignedPartition, Settings):
    """Client 0 has all samples of one class and some others. The rest is split evenly at random.

    Take it to see what is lost when one client leaves.

    Args:
        label: The class that no other client has.
        share: The fraction of the other samples that client 0 has.

    Raises:
        FlsuiteError: If there is no other client, no sample of the class, or too few others.
    """

    label: NonNegativeInt
    share: BelowOne = 0.1

    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        own = np.flatnonzero(labels == self.label)
        others = rng.permutation(np.flatnonzero(labels != self.label))
        extra = round(self.share * len(others))
        if clients < 2 or not len(own) or len(others) - extra < clients - 1:
            raise FlsuiteError(
                f"SoleOwner: {clients} clients cannot share {len(own)} samples of class "
                f"{self.label} and {len(others)} others; it takes a second client, a sample of the "
                "class, and one of another class for each further client"
            )

        client_of = np.zeros(len(labels), dtype=np.int64)
        for client, rest in enumerate(np.array_split(others[extra:], clients - 1), 1):
            client_of[rest] = client
        return client_of
