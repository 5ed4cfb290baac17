"""Robust centers of a cohort: medians, means without extremes, and clipped changes.

- Coordinate median and trimmed mean: Yin et al. 2018, definitions 1 and 2, algorithm 1.
  Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv:1803.01498.
- Geometric median: RFA, Pillutla, Kakade, Harchaoui 2022, algorithm 2. Robust Aggregation for
  Federated Learning, IEEE Transactions on Signal Processing 70, arXiv:1912.13445.
- Centered clipping: Karimireddy, He, Jaggi 2021, algorithm 1 (AGG of equation CC). Learning from
  History for Byzantine Robust Optimization, arXiv:2012.10333.
- Norm clipping: Sun et al. 2019, section 3. Can You Really Backdoor Federated Learning?,
  arXiv:1911.07963.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import Weighting
from flsuite.aggregators.rules.robust.base import (
    Clients,
    Cohort,
    ParameterRule,
    more_clients,
    number_of,
)
from flsuite.aggregators.rules.robust.vectors import Vectors, distances_from, squared_distances
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, PositiveInt, Radius


@dataclass(frozen=True)
class CoordinateMedian(ParameterRule):
    """The median of the clients' models, coordinate by coordinate: option I.

    Take it if nothing is known of the attackers: it has no argument.

    Less than half of the clients cannot move a coordinate beyond the range of the others. For an
    even number of clients, it is the mean of the two middle values.

    No client is excluded, so there are no weights in the log.
    """

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        return cohort.parameters.median()


@dataclass(frozen=True)
class TrimmedMean(ParameterRule):
    """The mean of the clients' models without the extremes, coordinate by coordinate: option II.

    Take it if you can bound the number of attackers, and single values are corrupt.

    The ``b`` largest and the ``b`` smallest values of a coordinate are excluded, so ``b`` attackers
    cannot move it beyond the range of the others. With ``b = 0``, it is the plain mean. Buffers are
    trimmed like parameters.

    No client is excluded as a whole, so there are no weights in the log.

    Args:
        trim: Clients to exclude at each end, ``b``, as an integer, or their fraction beta in
            [0, 0.5) as a float. More than ``2 b`` must come back.
    """

    trim: Clients = 0.1

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        return self.buffers(cohort.parameters)

    def buffers(self, buffers: Vectors) -> Tensor:
        count = len(buffers)
        trim = number_of(self.trim, count)
        if trim == 0:
            return buffers.mean([1.0] * count, count)
        kept = slice(trim, count - trim)
        return buffers.by_coordinate(lambda v: v[:, kept].mean(1, dtype=np.float64))

    def too_few(self, updates: int) -> str | None:
        trim = number_of(self.trim, updates)
        if updates > 2 * trim:
            return None
        return (
            f"TrimmedMean needs more than 2 b = {2 * trim} updates for b = {trim}, but there are "
            f"{updates}; {more_clients('trim', (updates - 1) // 2)}"
        )


@dataclass(frozen=True)
class GeometricMedian(ParameterRule):
    """The model with the smallest weighted sum of distances to the clients' models.

    Take it if whole models are corrupt, and clients may weigh by samples.

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


@dataclass(frozen=True)
class CenteredClipping(ParameterRule):
    """The centre plus the mean of the clients' distances from it, each clipped to a radius.

    Take it if attackers are few, and hide over many rounds.

    ``v <- v + 1/n sum_k (d_k - v) min(1, radius / |d_k - v|)`` with the clients' changes ``d_k``.
    It starts from the centre, and the last ``v`` is the change of the global model. A client moves
    it by at most ``radius / n`` per iteration. With an infinite radius, it is the plain mean.

    In the paper, clients send momenta. Here, they send their change from local training.

    Logged are each client's ``centre_distance`` and ``clipped`` (1 if it was) before the last
    iteration, its ``weight`` in the global change, and ``train/clip_radius``. A log line names
    clipped clients. The centre, one model, persists between rounds.

    Args:
        radius: The largest distance from the centre, tau. Default: the (lower) median of the
            cohort's distances, in each iteration.
        iterations: Number of iterations. The paper uses 1 with the previous centre.
        centre: ``previous`` starts from the previous round's change, and ``zero`` from zero.
    """

    radius: Radius | None = None
    iterations: PositiveInt = 1
    centre: Literal["previous", "zero"] = "previous"

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        vectors, count = cohort.parameters, len(cohort)
        kept = server.memory.get("centre")
        centre = torch.zeros_like(vectors.start) if kept is None else cohort.vector(kept)
        gram = vectors.gram(centre)

        # n v = sum_k weights_k d_k + rest centre, and the weights and the rest sum to n.
        weights, rest = torch.zeros(count, dtype=torch.float64), float(count)
        for _ in range(self.iterations):
            v = torch.cat([weights, weights.new_tensor([rest])]) / count
            distances = distances_from(gram, v)[:count]
            radius = distances.median().item() if self.radius is None else self.radius
            factors = _clip_factors(distances, radius)
            away = 1 - factors.sum().item() / count
            weights, rest = weights * away + factors, rest * away

        server.metrics["clip_radius"] = radius
        cohort.note("centre_distance", distances.tolist())
        cohort.note("clipped", (factors < 1).tolist())
        cohort.note("weight", (weights / count).tolist())
        cohort.name_clients(self, "clipped", (factors < 1).nonzero().flatten().tolist())

        new = vectors.mean(weights.tolist(), count, rest, centre.double())
        if self.centre == "previous":
            server.memory["centre"] = cohort.entries(new - vectors.start)
        return new


@dataclass(frozen=True)
class NormClipping(ParameterRule):
    """The mean of the clients' changes, each clipped to a maximum norm.

    Take it against scaled updates. Backdoors of usual norm pass.

    A change ``d`` counts as ``d min(1, radius / |d|)``, so a client with weight ``q`` moves the
    global model by at most ``q radius``. With an infinite radius, it is FedAvg.

    Logged are each client's ``update_norm``, ``clipped`` (1 if it was scaled down) and ``weight``,
    the factor of its change, and ``train/clip_radius``. A log line names clipped clients.

    Args:
        radius: The maximum norm of a change. Default: the (lower) median of the cohort's norms.
        weighting: ``uniform``, or ``samples`` as in FedAvg. With ``samples``, an attacker could
            claim many samples.
    """

    radius: Radius | None = None
    weighting: Weighting = "uniform"

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        norms = cohort.parameters.squared_norms().sqrt()
        radius = norms.median().item() if self.radius is None else self.radius
        factors = _clip_factors(norms, radius).tolist()

        own = cohort.weights(self.weighting)
        weights = [n * factor for n, factor in zip(own, factors, strict=True)]
        total = sum(own)
        cohort.note("update_norm", norms.tolist())
        cohort.note("clipped", (factor < 1 for factor in factors))
        cohort.note("weight", (weight / total for weight in weights))
        server.metrics["clip_radius"] = radius
        cohort.name_clients(self, "clipped", (k for k, factor in enumerate(factors) if factor < 1))
        # The clipped fraction of a client's weight goes to the global model.
        return cohort.parameters.mean(weights, total, total - sum(weights))


def _clip_factors(norms: Tensor, radius: float) -> Tensor:
    """Return ``min(1, radius / norm)`` of each norm, and 1 for a norm of 0."""
    # Select only ratios below 1, because 0 / 0 and infinity / infinity are NaN.
    return (radius / norms).where(norms > radius, 1.0)
