"""Clients that are the owners of the data."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from flsuite.common.arguments import BelowOne, NonNegativeInt, Settings
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


@dataclass
class SoleOwner(AssignedPartition, Settings):
    """Client 0 has all samples of one class and some others. The rest is split evenly at random.

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
