"""Clients that have neighboring values of an ordered property."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.data.partitions.base import Array, AssignedPartition


@dataclass
class Ranked(AssignedPartition, Settings):
    """Samples are ranked by their class plus noise, and cut into clients of equal size.

    For an ordered property, such as a grade, or the target of a regression in ``data.bins``.
    Without noise, each client has a few neighboring classes. Much noise approaches IID. Clients are
    numbered at random, not by rank.

    Args:
        noise: Standard deviation of the noise, as a fraction of the range of the classes.
    """

    noise: NonNegativeFloat = 0.0

    def client_of(self, labels: Array, clients: int, rng: Generator, ids: Array | None) -> Array:
        spread = self.noise * max(np.ptp(labels), 1)
        # A second random key, so that equal classes are not ranked by their order in the file.
        noisy = labels + spread * rng.standard_normal(len(labels))
        order = np.lexsort((rng.random(len(labels)), noisy))
        owners = np.empty(len(labels), dtype=np.int64)
        cuts = np.linspace(0, len(labels), clients + 1).round().astype(np.int64)
        owners[order] = np.repeat(rng.permutation(clients), np.diff(cuts))
        return owners
