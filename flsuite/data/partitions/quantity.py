"""Clients that differ only in size."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, PositiveInt
from flsuite.data.partitions.counts import CountPartition, apportion


@dataclass
class QuantitySkew(CountPartition):
    """IID classes and skewed sizes.

    Every client first gets ``min_samples``. The rest is shared in proportion to one random weight
    per client. Li et al. 2022 (arXiv:2102.02079) draw the sizes from a Dirichlet distribution. All
    samples are used.

    Args:
        distribution: The distribution of the weights: ``lognormal`` (``exp(sigma * z)`` with
            standard normal z) or ``dirichlet``.
        sigma: Spread of the lognormal, at least 0. With 0, sizes differ by at most one.
        alpha: Concentration of the Dirichlet, above 0. A smaller value gives more unequal sizes.
        min_samples: Minimum number of samples per client, at least 1.

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to
            every client.
    """

    needs_labels = False

    distribution: Literal["lognormal", "dirichlet"] = "lognormal"
    sigma: NonNegativeFloat = 1.0
    alpha: PositiveFloat = 0.5
    min_samples: PositiveInt = 1

    def counts(self, sizes: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        if self.distribution == "lognormal":
            exponent = self.sigma * rng.standard_normal(clients)
            weights = np.exp(exponent - exponent.max())  # at most 1, to prevent overflow
            weights /= weights.sum()
        else:
            weights = rng.dirichlet(np.full(clients, self.alpha))

        # The rest of the samples is shared like a class in Dirichlet.
        rest = sizes - self.min_samples * clients
        return self.min_samples + apportion(weights[None], rest, rng)
