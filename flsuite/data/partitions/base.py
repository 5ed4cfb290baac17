"""What a partition is, and how counts of samples become clients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.random import Generator

from flsuite.common.arguments import Settings
from flsuite.common.errors import FlsuiteError
from flsuite.data.arguments import PlainArguments
from flsuite.data.federated import PublishedSplits, Rows

Array = np.ndarray


class Partition(PlainArguments, ABC):
    """A rule that splits samples over clients.

    A subclass stores each parameter of its ``__init__`` under the same name. It is a pure function
    of its arguments: the same generator gives the same split.

    Attributes:
        needs_labels: Whether the split depends on the samples' classes.
    """

    needs_labels: ClassVar[bool] = True

    def arranged(self, published: PublishedSplits) -> PublishedSplits:
        """Return the published splits as this partition divides them. Default: unchanged."""
        return published

    @abstractmethod
    def __call__(
        self,
        labels: Array,
        clients: int,
        rng: Generator,
        ids: Array | None = None,
    ) -> Sequence[Array]:
        """Split ``range(len(labels))``.

        Args:
            labels: int64 ``(n,)``, one class per sample.
            clients: Number of clients.
            rng: The only source of randomness.
            ids: int64 ``(n,)``, the natural owner of each sample, if the data has owners.

        Returns:
            One ascending int64 index array or tensor per client, disjoint, each with at least one
            sample.

        Raises:
            FlsuiteError: If the request cannot be met. The message names the parameter to change.
        """


def checked_rows(partition: Partition, rows: Sequence[Array], samples: int, clients: int) -> Rows:
    """Return the result of a partition with each client's rows in ascending order.

    Raises:
        FlsuiteError: If it is not one array of existing rows per client, or arrays overlap.
    """

    def refuse(reason: str) -> NoReturn:
        raise FlsuiteError(
            f"data.partition: {type(partition).__name__} {reason}; return one array of rows per "
            "client, each with at least one, and no row twice"
        )

    if not isinstance(rows, Rows):
        if not hasattr(rows, "__len__") or isinstance(rows, Mapping):  # a generator, None
            refuse(f"returned a {type(rows).__name__}")
        rows = [_array(own) for own in rows]
        for client, own in enumerate(rows):
            if own.ndim != 1 or (len(own) and own.dtype.kind not in "iu"):
                refuse(f"returned {own.dtype} of shape {own.shape} for client {client}")
    stored = Rows.of(rows)
    values = stored.values.numpy()
    if len(stored) != clients:
        refuse(f"returned {len(stored)} arrays for {clients} clients")
    if empty := np.flatnonzero(stored.lengths() == 0).tolist():
        refuse(f"left client {empty[0]} without samples")
    if len(outside := values[(values < 0) | (values >= samples)]):
        refuse(f"returned row {outside.max()}, and there are {samples}")
    owners = stored.client_of(samples)
    if np.count_nonzero(owners >= 0) < len(values):
        refuse("returned some rows twice")
    grows = np.diff(values) > 0
    grows[stored.offsets[1:-1].numpy() - 1] = True  # from one client to the next
    return stored if grows.all() else Rows.of_clients(owners, clients)


def _array(rows: Any) -> Array:
    try:
        own = np.asarray(rows)
        return np.array(own.tolist()) if own.dtype == object else own
    except ValueError:  # lists of unequal length
        return np.asarray(rows, dtype=object)


class AssignedPartition(Partition):
    """A partition that assigns each sample to a client."""

    @abstractmethod
    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        """Return the client of each sample, int64 ``(n,)``.

        The arguments are those of a partition, with at most as many clients as samples. A number
        outside ``range(clients)`` means that the sample is unused.
        """

    def __call__(
        self, labels: Array, clients: int, rng: Generator, ids: Array | None = None
    ) -> Sequence[Array]:
        if clients < 1:
            raise FlsuiteError(f"data: clients must be at least 1, got {clients}")
        if clients > len(labels):
            raise FlsuiteError(
                f"{clients} clients cannot share {len(labels)} training samples; lower data.clients"
            )
        return Rows.of_clients(self.client_of(labels, clients, rng, ids), clients)


def partition_labels(targets: Array) -> Array:
    """Return one class per sample, int64 ``(n,)``, for partitions that need one.

    Multi-label targets ``(n, labels)`` become the first positive label, or ``labels`` (one more
    class, "none") where no label is positive.
    """
    if targets.ndim == 1:
        return targets.astype(np.int64)
    return np.where(targets.any(axis=1), targets.argmax(axis=1), targets.shape[1]).astype(np.int64)


class CountPartition(AssignedPartition, Settings):
    """A partition that is a table of counts: a number of samples per class and client.

    Attributes:
        min_samples: Minimum number of samples per client.
        max_redraws: Maximum redraws if a client has fewer. The last table is then leveled.

    Raises:
        FlsuiteError: If the data cannot give ``min_samples`` to every client, or has too few
            classes.
    """

    min_samples: int = 1
    max_redraws: int = 0

    @abstractmethod
    def counts(self, sizes: Array, clients: int, rng: Generator) -> Array:
        """Draw a table, int64 ``(classes, clients)``.

        Args:
            sizes: Samples of each class, int64 ``(classes,)``. There is a single class if the split
                does not depend on classes.
            clients: Number of clients.
            rng: The only source of randomness.
        """

    def require_enough(self, samples: int, clients: int) -> None:
        """Refuse data that cannot give ``min_samples`` to every client."""
        if self.min_samples * clients > samples:
            raise FlsuiteError(
                f"{clients} clients cannot have {self.min_samples} each of {samples} training "
                f"samples; lower {type(self).__name__}.min_samples or data.clients"
            )

    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        self.require_enough(len(labels), clients)
        seen = labels if self.needs_labels else np.zeros_like(labels)
        classes = np.unique(seen, return_inverse=True)[1]
        sizes = np.bincount(classes)
        # Bounded, because an almost infeasible request would be redrawn forever.
        for _ in range(1 + self.max_redraws):
            counts = self.counts(sizes, clients, rng)
            if counts.sum(axis=0).min() >= self.min_samples:
                break
        return assign_by_counts(classes, _leveled(counts, self.min_samples), rng)


def assign_by_counts(classes: Array, counts: Array, rng: Generator) -> Array:
    """Draw the counted number of samples of each class for each client, without replacement.

    Every class-based partition computes such a table first and assigns samples only here, so no
    partition can assign a sample twice.

    Args:
        classes: int64 ``(n,)``, classes numbered from 0 without gaps.
        counts: int64 ``(classes, clients)``. Samples of a class beyond its row's sum stay unused.
        rng: Draws the samples of a class for each client.

    Returns:
        The client of each sample, int64 ``(n,)``. An unused sample has the value ``clients``.
    """
    clients = counts.shape[1]

    # Unused samples go to an extra client, whose rows are then dropped.
    unused = np.bincount(classes, minlength=len(counts)) - counts.sum(axis=1)
    table = np.column_stack([counts, unused])
    client_of = np.repeat(np.tile(np.arange(clients + 1), len(counts)), table.ravel())

    # Samples in random order within each class, then the first ones to the first client, and so on.
    shuffled = rng.permutation(len(classes)).astype(np.int64)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    owners = np.empty_like(client_of)
    owners[by_class] = client_of
    return owners


def apportion(shares: Array, sizes: Array, rng: Generator) -> Array:
    """Turn shares into whole counts, int64 ``(classes, clients)``.

    Row k sums to ``sizes[k]``.

    Each row is cut at its rounded cumulative shares. The rounding depends on the position, which
    would favor the same clients in every class. Each row's counts are therefore shuffled, which
    preserves the distribution of exchangeable shares.

    Args:
        shares: float64 ``(classes, clients)``, each row sums to 1.
        sizes: int64 ``(classes,)``.
        rng: Shuffles each row.
    """
    return rng.permuted(_cut(shares, sizes), axis=1)


def apportion_by_client(shares: Array, sizes: Array, rng: Generator) -> Array:
    """Turn shares into whole counts like :func:`apportion`, but keep each client's own share.

    This is for shares that depend on each other across the classes of a client. Each row is cut in
    its own random order, so rounding does not favor any client.

    Args:
        shares: float64 ``(classes, clients)``, each row sums to 1.
        sizes: int64 ``(classes,)``.
        rng: Draws the order of each row.
    """
    order = rng.permuted(np.tile(np.arange(shares.shape[1]), (len(shares), 1)), axis=1)
    counts = np.empty(shares.shape, np.int64)
    np.put_along_axis(counts, order, _cut(np.take_along_axis(shares, order, 1), sizes), 1)
    return counts


def _cut(shares: Array, sizes: Array) -> Array:
    """Return the counts between each row's rounded cumulative shares."""
    cuts = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
    cuts[:, -1] = sizes
    return np.diff(cuts, axis=1, prepend=0)


def _leveled(counts: Array, min_samples: int) -> Array:
    """Move samples from the largest clients to those with fewer than ``min_samples``.

    On a tie, the client with the lower number gives or gets the sample.
    """
    counts = counts.copy()
    sizes = counts.sum(axis=0)
    while sizes[smallest := sizes.argmin()] < min_samples:
        largest = sizes.argmax()
        k = counts[:, largest].argmax()
        counts[k, [largest, smallest]] += (-1, 1)
        sizes[[largest, smallest]] += (-1, 1)
    return counts
