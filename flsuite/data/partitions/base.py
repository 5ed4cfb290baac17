"""The interface of a partition."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.random import Generator

from flsuite.common.errors import FlsuiteError
from flsuite.data.arguments import PlainArguments
from flsuite.data.rows import Rows

Array = np.ndarray


class Partition(PlainArguments, ABC):
    """A rule that splits samples over clients.

    A subclass stores each parameter of its ``__init__`` under the same name. It is a pure function
    of its arguments: the same generator gives the same split.

    Attributes:
        needs_labels: Whether the split depends on the samples' classes.
    """

    needs_labels: ClassVar[bool] = True

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
            One ascending int64 index array per client, disjoint, each with at least one sample.

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
    if len(stored) != clients:
        refuse(f"returned {len(stored)} arrays for {clients} clients")
    if empty := np.flatnonzero(stored.lengths() == 0).tolist():
        refuse(f"left client {empty[0]} without samples")
    if stored.values.min() < 0 or stored.values.max() >= samples:
        outside = stored.values.max() if stored.values.max() >= samples else stored.values.min()
        refuse(f"returned row {outside}, and there are {samples}")
    owners = stored.client_of(samples)
    if np.count_nonzero(owners >= 0) < len(stored.values):
        refuse("returned some rows twice")
    grows = np.diff(stored.values) > 0
    grows[stored.offsets[1:-1] - 1] = True  # from one client to the next
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
