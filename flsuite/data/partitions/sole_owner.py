"""A class that one client alone has."""

from collections.abc import Sequence

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.errors import FlsuiteError, require_at_least, require_below_one

__all__ = ["SoleOwner"]


class SoleOwner(Partition):
    """Client 0 has all samples of one class and some others. The rest is split evenly at random.

    Args:
        label: The class that no other client has.
        share: The share of the other samples that client 0 has.

    Raises:
        FlsuiteError: If there is no other client, no sample of the class, or too few others.
    """

    def __init__(self, label: int, share: float = 0.1) -> None:
        self.label = label
        self.share = share
        require_at_least("SoleOwner", 0, label=label)
        require_below_one("SoleOwner", share=share)

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
