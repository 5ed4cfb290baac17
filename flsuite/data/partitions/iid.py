"""Independent and identically distributed clients."""

import numpy as np

from flsuite.data.partitions.counts import CountPartition


class IID(CountPartition):
    """A random split into clients of nearly equal size (McMahan et al. 2017, arXiv:1602.05629).

    Sizes differ by at most one.
    """

    needs_labels = False

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        counts = np.full((1, clients), sizes[0] // clients)
        counts[0, : sizes[0] % clients] += 1
        return counts
