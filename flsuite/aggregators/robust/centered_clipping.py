"""Centered clipping: Karimireddy, He, Jaggi 2021, algorithm 1 (AGG of equation CC).

Learning from History for Byzantine Robust Optimization, arXiv:2012.10333.
"""

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from flsuite.aggregators.robust.base import ParameterRule, require_radius
from flsuite.aggregators.robust.cohort import Cohort
from flsuite.aggregators.robust.norm_clipping import clip_factors
from flsuite.errors import require_one_of, require_whole

__all__ = ["CenteredClipping"]

Centre = Literal["previous", "zero"]


class CenteredClipping(ParameterRule):
    """The centre plus the mean of the clients' distances from it, each clipped to a radius.

    ``v <- v + 1/n sum_k (d_k - v) min(1, radius / |d_k - v|)`` with the clients' changes ``d_k``.
    It starts from the centre, and the last ``v`` is the change of the global model. A client moves
    it by at most ``radius / n`` per iteration. With an infinite radius it is the plain mean.

    The paper's clients send momenta. Here they send what their local training has changed.

    Updates may be stale: a change is measured from the version that its client started from.

    The log has each client's ``centre_distance`` and ``clipped`` (1 if it was) before the last
    iteration, its ``weight`` in the global change, and ``train/clip_radius``. Clipped clients are
    named in a line. The models of a round are in memory at a time, for ``n`` clients of ``d``
    parameters ``4 n d`` bytes, and the centre, one model, from round to round.

    Args:
        radius: The largest distance from the centre, tau. Default: the (lower) median of the
            cohort's distances, in each iteration.
        iterations: Number of iterations. The paper takes 1 with the previous centre.
        centre: ``previous`` starts from the change of the round before, and ``zero`` from none.
    """

    accepts_stale: ClassVar[bool] = True

    def __init__(
        self, radius: float | None = None, iterations: int = 1, centre: Centre = "previous"
    ) -> None:
        self.radius = radius
        self.iterations = iterations
        self.centre = centre
        require_radius("CenteredClipping", radius)
        require_whole("CenteredClipping", 1, iterations=iterations)
        require_one_of("CenteredClipping", get_args(Centre), centre=centre)

    def combine(self, cohort: Cohort) -> Tensor:
        vectors, count = cohort.parameters, len(cohort)
        kept = self.memory.get("centre")
        centre = torch.zeros_like(vectors.start) if kept is None else cohort.vector(kept)
        gram = vectors.gram(centre)

        # n v = sum_k weights_k d_k + rest centre, and the weights and the rest sum to n.
        weights, rest = torch.zeros(count, dtype=torch.float64), float(count)
        for _ in range(self.iterations):
            v = torch.cat([weights, weights.new_tensor([rest])]) / count
            distances = _distances(gram, v)[:count]
            radius = distances.median().item() if self.radius is None else self.radius
            factors = clip_factors(distances, radius)
            away = 1 - factors.sum().item() / count
            weights, rest = weights * away + factors, rest * away

        self.metrics["clip_radius"] = radius
        cohort.note("centre_distance", distances.tolist())
        cohort.note("clipped", (factors < 1).tolist())
        cohort.note_weights((weights / count).tolist())
        self.name(cohort, "clipped", (factors < 1).nonzero().flatten().tolist())

        new = vectors.mean(weights.tolist(), count, rest, centre.double())
        if self.centre == "previous":
            self.memory["centre"] = cohort.entries(new - vectors.start)
        return new


def _distances(gram: Tensor, v: Tensor) -> Tensor:
    """Return the distances of points from ``sum_k v_k x_k``, given all inner products."""
    products = gram @ v
    return (gram.diagonal() - 2 * products + v @ products).clamp(min=0.0).sqrt()
