"""Clients that differ in size only."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.data.partitions.counts import apportion, assign_by_counts, check_min_samples
from flsuite.errors import require_at_least, require_one_of, require_positive

__all__ = ["QuantitySkew"]

Distribution = Literal["lognormal", "dirichlet"]


class QuantitySkew(Partition):
    """IID classes and skewed sizes.

    Every client first has ``min_samples``. The rest is shared in proportion to one random weight
    per client. Li et al. 2022 (arXiv:2102.02079) draw the sizes from a Dirichlet distribution. All
    samples are used.

    Args:
        distribution: The distribution of the weights: ``lognormal`` (``exp(sigma * z)`` with
            standard normal z) or ``dirichlet``.
        sigma: Spread of the lognormal, at least 0. With 0, sizes differ by at most one.
        alpha: Concentration of the Dirichlet, above 0. The smaller, the more unequal.
        min_samples: The fewest samples per client, at least 1.

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to
            every client.
    """

    needs_labels = False

    def __init__(
        self,
        distribution: Distribution = "lognormal",
        sigma: float = 1.0,
        alpha: float = 0.5,
        min_samples: int = 1,
    ) -> None:
        self.distribution: Distribution = distribution
        self.sigma = sigma
        self.alpha = alpha
        self.min_samples = min_samples

        own = "QuantitySkew"
        require_one_of(own, get_args(Distribution), distribution=distribution)
        require_at_least(own, 0, sigma=sigma)
        require_positive(own, alpha=alpha)
        require_at_least(own, 1, min_samples=min_samples)

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        self.check_enough(len(labels), clients)
        check_min_samples("QuantitySkew", self.min_samples, clients, len(labels))

        if self.distribution == "lognormal":
            exponent = self.sigma * rng.standard_normal(clients)
            weights = np.exp(exponent - exponent.max())  # at most 1, so that nothing overflows
            weights /= weights.sum()
        else:
            weights = rng.dirichlet(np.full(clients, self.alpha))

        # One class with the rest of the samples, shared like a class in Dirichlet.
        rest = np.array([len(labels) - self.min_samples * clients])
        sizes = self.min_samples + apportion(weights[None], rest, rng)
        return assign_by_counts(np.zeros(len(labels), dtype=np.int64), sizes, rng)
