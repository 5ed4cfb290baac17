"""Geometric median: RFA, Pillutla, Kakade, Harchaoui 2022, algorithm 2.

Robust Aggregation for Federated Learning, IEEE Transactions on Signal Processing 70,
arXiv:1912.13445.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import Weighting
from flsuite.aggregators.rules.robust.base import ParameterRule
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.vectors import distances_from, squared_distances
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class GeometricMedian(ParameterRule):
    """The model with the smallest weighted sum of distances to the clients' models.

    It stays bounded while the attackers have less than half of the weight. The smoothed Weiszfeld
    iterations start from the mean of the half of the models around the most central one. They use
    the inner products of the changes, so an iteration costs ``n ** 2`` operations and does not read
    the models.

    Logged are each client's ``weight`` in the median, and ``train/rfa_steps``, the iterations.

    Args:
        iterations: Maximum number of Weiszfeld iterations. The paper uses 3, because each of its
            iterations is a round of secure aggregation.
        smoothing: The smallest distance to a model, ``nu``.
        tolerance: Iterations stop once the median moves by less than this fraction of the clients'
            median distance from it.
        weighting: ``uniform``, or ``samples`` as in the paper. With ``samples``, an attacker could
            claim half of all samples.
    """

    iterations: PositiveInt = 100
    smoothing: PositiveFloat = 1e-6
    tolerance: NonNegativeFloat = 1e-6
    weighting: Weighting = "uniform"

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        own = cohort.weights(self.weighting)
        alpha = torch.tensor(own, dtype=torch.float64) / sum(own)
        gram = cohort.parameters.gram()

        beta, steps = _weiszfeld(gram, alpha, self.smoothing, self.iterations, self.tolerance)
        server.metrics["rfa_steps"] = float(steps)
        cohort.note("weight", beta.tolist())
        return cohort.parameters.mean(beta.tolist(), 1.0)


def _weiszfeld(
    gram: Tensor, alpha: Tensor, smoothing: float, iterations: int, tolerance: float
) -> tuple[Tensor, int]:
    """Return the weights of the points in their geometric median, and the number of iterations.

    The median is ``z = sum_k beta_k x_k``.

    Args:
        gram: Inner products of the points, float64 ``(n, n)``.
        alpha: Weights of the distances ``(n,)``, which sum to 1.
        smoothing: The smallest distance, ``nu``.
        iterations: The largest number of iterations.
        tolerance: The largest final move, relative to the median distance.
    """
    beta = _around_medoid(squared_distances(gram).sqrt(), alpha)
    for step in range(iterations):
        distances = distances_from(gram, beta).clamp(min=smoothing)
        closer = alpha / distances
        closer /= closer.sum()
        move, beta = closer - beta, closer
        if (move @ gram @ move).clamp(min=0.0).sqrt() <= tolerance * distances.median():
            return beta, step + 1
    return beta, iterations


def _around_medoid(distances: Tensor, alpha: Tensor) -> Tensor:
    """Return weights of the half of the points around the most central one.

    The mean of all points can be arbitrarily far away with a single attacker, and so can a median
    that starts there, after any fixed number of iterations.

    Args:
        distances: Distances of all pairs ``(n, n)``.
        alpha: Weights of the points ``(n,)``.
    """
    medoid = int((distances @ alpha).argmin())
    nearest = torch.sort(distances[medoid], stable=True).indices
    chosen = nearest[: len(alpha) // 2 + 1]
    beta = torch.zeros_like(alpha)
    beta[chosen] = alpha[chosen] / alpha[chosen].sum()
    return beta
