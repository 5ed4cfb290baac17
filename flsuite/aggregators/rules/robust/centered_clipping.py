"""Centered clipping: Karimireddy, He, Jaggi 2021, algorithm 1 (AGG of equation CC).

Learning from History for Byzantine Robust Optimization, arXiv:2012.10333.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.robust.base import ParameterRule
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.norm_clipping import clip_factors
from flsuite.aggregators.rules.robust.vectors import distances_from
from flsuite.common.arguments import PositiveInt, Radius


@dataclass(frozen=True)
class CenteredClipping(ParameterRule):
    """The centre plus the mean of the clients' distances from it, each clipped to a radius.

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
            factors = clip_factors(distances, radius)
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
