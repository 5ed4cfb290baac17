"""Independent and identically distributed clients."""

from collections.abc import Sequence

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.data.partitions.counts import assign_by_counts

__all__ = ["IID"]


class IID(Partition):
    """A random split into clients of nearly equal size (McMahan et al. 2017, arXiv:1602.05629).

    Sizes differ by at most one.
    """

    needs_labels = False

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        self.check_enough(len(labels), clients)
        sizes = np.full((1, clients), len(labels) // clients)
        sizes[0, : len(labels) % clients] += 1
        # All samples are of one class to the table: IID ignores labels.
        return assign_by_counts(np.zeros(len(labels), dtype=np.int64), sizes, rng)
