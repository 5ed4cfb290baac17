"""Clients that correspond to the natural owners of the data."""

import heapq

import numpy as np
from numpy.random import Generator

from flsuite.common.errors import FlsuiteError
from flsuite.data.partitions.base import Array, AssignedPartition


class Natural(AssignedPartition):
    """Each owner in the data (a writer, a device) is a client, as in FEMNIST.

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
