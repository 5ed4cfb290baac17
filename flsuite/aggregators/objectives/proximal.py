"""The proximal term of FedProx: Li et al. 2020, algorithm 2.

Federated Optimization in Heterogeneous Networks, arXiv:1812.06127.
"""

from dataclasses import dataclass

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.optimizers import about_to_step
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.messages import ClientContext
from flsuite.common.state import State


@dataclass(frozen=True)
class Proximal(Objective, Settings):
    """Clients minimize ``F_i(w) + mu / 2 ||w - w_global||^2`` (eq. 2).

    The gradient ``mu (w - w_global)`` is added once per step, after mixed precision has unscaled
    the gradient and micro-batches have accumulated. ``trainer.gradient_clip_val`` then bounds the
    sum, as it would for a loss with this term. Private parameters have no global value, so the term
    does not apply to them.

    Args:
        mu: Weight of the proximal term. 0 disables it.
    """

    mu: NonNegativeFloat = 0.01

    def callbacks(self, client: ClientContext) -> list[Callback]:
        # Without a callback, mu = 0 costs nothing and is FedAvg bit for bit.
        return [_ProximalTerm(self.mu, client.global_state)] if self.mu else []


class _ProximalTerm(Callback):
    """The client half. It adds the term's gradient to the parameters that are about to step."""

    supports_stack = True

    def __init__(self, mu: float, global_state: State) -> None:
        self.mu = mu
        self.global_state = global_state
        self.anchors: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Move to the parameters' device once per fit, not once per step.
        parameters = pl_module.named_parameters()
        self.anchors = {
            k: self.global_state[k].to(p.device) for k, p in parameters if k in self.global_state
        }

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        for name, parameter, gradient in about_to_step(optimizer, pl_module.named_parameters()):
            if name in self.anchors:
                gradient.add_(parameter.detach() - self.anchors[name], alpha=self.mu)
