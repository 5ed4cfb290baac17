"""Clients that have only a few classes."""

from dataclasses import dataclass

import numpy as np

from flsuite.common.arguments import PositiveInt
from flsuite.common.errors import FlsuiteError
from flsuite.data.partitions.counts import CountPartition


@dataclass
class Pathological(CountPartition):
    """``classes_per_client`` classes per client, every class split evenly over its clients.

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
