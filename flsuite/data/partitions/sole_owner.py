"""A class that one client alone has."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flsuite.arguments import BelowOne, NonNegativeInt, Settings
from flsuite.data.partitions.base import Partition
from flsuite.errors import FlsuiteError

__all__ = ["SoleOwner"]


@dataclass
class SoleOwner(Partition, Settings):
    """Client 0 has all samples of one class and some others. The rest is split evenly at random.

    Args:
        label: The class that no other client has.
        share: The share of the other samples that client 0 has.

    Raises:
        FlsuiteError: If there is no other client, no sample of the class, or too few others.
    """

    label: NonNegativeInt
    share: BelowOne = 0.1

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        self.check_enough(len(labels), clients)
        own = np.flatnonzero(labels == self.label)
        others = rng.permutation(np.flatnonzero(labels != self.label))
        taken = round(self.share * len(others))
        if clients < 2 or not len(own) or len(others) - taken < clients - 1:
            raise FlsuiteError(
                f"SoleOwner: {clients} clients cannot share {len(own)} samples of class "
                f"{self.label} and {len(others)} others; it takes a second client, a sample of the "
                "class, and one of another class for each further client"
            )

        rest = np.array_split(others[taken:], clients - 1)
        parts = [np.concatenate([own, others[:taken]]), *rest]
        return [np.sort(part) for part in parts]
