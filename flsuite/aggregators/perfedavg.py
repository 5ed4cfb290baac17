"""Per-FedAvg: Fallah et al. 2020, algorithm 1, first-order and Hessian-free.

Personalized Federated Learning: A Meta-Learning Approach, arXiv:2002.07948.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Settings
from flsuite.common.client import Oracle
from flsuite.common.state import State, add


class PerFedAvg(FedAvg):
    """Clients train a model that is good after one step of adaptation.

    Take it if new clients must adapt in one or a few steps.

    Batches come in pairs. On the first one, ``w~ = w - alpha grad F(w)`` (line 7). On the second
    one, the model's optimizer steps from ``w`` with the gradient at ``w~`` (line 8). If a fit has
    an odd number of batches, the last one serves as both. The rate ``beta`` of the paper is the
    optimizer's. The paper weights all clients equally: set ``weighting`` to ``uniform`` for this.
    Clients are scored by the global model. Set ``trainer.adapt_epochs`` to score them after an
    adaptation, too, which takes whole epochs of the model's optimizer. A fit costs as much as one
    of FedAvg, and twice as much if ``hessian_free``.

    Args:
        alpha: Rate of the adaptation step. With 0 this is FedAvg on every second batch.
        order: ``first`` leaves out the Hessian, as in FO-MAML. ``hessian_free`` approximates its
            product with the gradient by a difference of two more (eq. 9). They are on the second
            batch, where the paper draws a third one.
        delta: Step of the difference.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        alpha: NonNegativeFloat = 0.01,
        order: Literal["first", "hessian_free"] = "first",
        delta: PositiveFloat = 1e-3,
        **kwargs: Any,
    ) -> None:
        self.alpha, self.order, self.delta = alpha, order, delta
        super().__init__(objective=MetaGradient(alpha, order, delta), **kwargs)


@dataclass(frozen=True)
class MetaGradient(Objective, Settings):
    """The gradient of the loss after one step of adaptation. See :class:`PerFedAvg`."""

    alpha: NonNegativeFloat = 0.01
    order: Literal["first", "hessian_free"] = "first"
    delta: PositiveFloat = 1e-3

    batches_per_step = 2

    def gradient(self, oracle: Oracle, w: State, held: Any, batch: Any) -> tuple[State, Any]:
        b1, b2 = batch
        w_tilde = add(w, oracle(w, b1), -self.alpha)  # line 7
        g = oracle(w_tilde, b2)
        if self.order == "first" or not self.alpha:
            return g, held

        # In full precision, because rounding to half would be larger than the difference.
        zeros = {k: torch.zeros_like(value) for k, value in g.items()}
        plus, minus = (
            zeros | oracle(add(w, g, step), b2, in_full=True) for step in (self.delta, -self.delta)
        )
        product = {k: (plus[k] - minus[k]) / (2 * self.delta) for k in g}  # eq. 9
        return add(g, product, -self.alpha), held  # line 8
