"""Clients that differ in size only."""

import math
from typing import Literal

import numpy as np

from flsuite.data.partitions.base import Partition
from flsuite.data.partitions.dirichlet import apportion, check_min_samples, check_positive
from flsuite.data.partitions.iid import deal
from flsuite.errors import FlsuiteError

__all__ = ["QuantitySkew"]


class QuantitySkew(Partition):
    """IID classes, skewed sizes (Li et al. 2022, arXiv:2102.02079, draw them from a Dirichlet distribution).

    Every client first has ``min_samples``; what is left is shared in proportion to one random weight a client. All
    samples are used.

    Args:
        distribution: Of the weights: ``lognormal`` (``exp(sigma * z)``, z standard normal) or ``dirichlet``.
        sigma: Spread of the lognormal, at least 0; with 0 sizes differ by at most one.
        alpha: Concentration of the Dirichlet, above 0; the smaller, the more unequal.
        min_samples: The fewest samples a client may have, at least 1.

    Raises:
        FlsuiteError: If a parameter is out of range, or the data cannot give ``min_samples`` to every client.
    """

    def __init__(
        self,
        distribution: Literal["lognormal", "dirichlet"] = "lognormal",
        sigma: float = 1.0,
        alpha: float = 0.5,
        min_samples: int = 1,
    ) -> None:
        if distribution not in ("lognormal", "dirichlet"):
            raise FlsuiteError(
                f"QuantitySkew.distribution must be lognormal or dirichlet, got {distribution}"
            )
        if not (math.isfinite(sigma) and sigma >= 0):
            raise FlsuiteError(f"QuantitySkew.sigma must be finite and at least 0, got {sigma}")
        check_positive("QuantitySkew.alpha", alpha)
        if min_samples < 1:
            raise FlsuiteError(f"QuantitySkew.min_samples must be at least 1, got {min_samples}")
        self.distribution = distribution
        self.sigma = sigma
        self.alpha = alpha
        self.min_samples = min_samples

    def __call__(
        self,
        labels: np.ndarray,
        clients: int,
        rng: np.random.Generator,
        ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        self.check_enough(len(labels), clients)
        check_min_samples("QuantitySkew", self.min_samples, clients, len(labels))
        if self.distribution == "lognormal":
            exponent = self.sigma * rng.standard_normal(clients)
            weights = np.exp(exponent - exponent.max())  # the largest is 1: no overflow
            weights /= weights.sum()
        else:
            weights = rng.dirichlet(np.full(clients, self.alpha))
        spare = np.array([len(labels) - self.min_samples * clients])
        sizes = self.min_samples + apportion(weights[None], spare, rng)
        return deal(np.zeros(len(labels), dtype=np.int64), sizes, rng)
