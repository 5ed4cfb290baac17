"""A class that only one client has."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from flsuite.common.arguments import BelowOne, NonNegativeInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.data.partitions.base import Array, AssignedPartition


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
