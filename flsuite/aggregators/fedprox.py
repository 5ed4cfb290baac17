"""FedProx: Li et al. 2020, Federated Optimization in Heterogeneous Networks, arXiv:1812.06127, algorithm 2."""

import math

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext
from flsuite.state import State

__all__ = ["FedProx"]


class FedProx(FedAvg):
    """FedAvg whose clients minimise ``F_i(w) + mu / 2 ||w - w_global||^2`` (eq. 2): they stay near the global model.

    The pull ``mu (w - w_global)`` is added to the gradient once a step: after mixed precision has unscaled it and
    micro-batches have been accumulated, and before ``trainer.gradient_clip_val`` bounds the sum of the two, as it would
    bound the gradient of a loss that contained the term. Private parameters have no global value and no pull.

    Args:
        mu: Strength of the pull; 0 is FedAvg.
        weighting: As for FedAvg.
    """

    def __init__(self, mu: float = 0.01, weighting: Weighting = "samples") -> None:
        super().__init__(weighting)
        if not 0 <= mu < math.inf:
            raise FlsuiteError(f"FedProx: mu must be a finite number from 0 up, got {mu}")
        self.mu = mu

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_ProximalTerm(self.mu, client.global_state)] if self.mu else []


class _ProximalTerm(Callback):
    """Adds the gradient of ``mu / 2 ||w - w_global||^2`` to the parameters that are about to step."""

    def __init__(self, mu: float, global_state: State) -> None:
        self.mu = mu
        self.global_state = global_state
        self.anchors: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = pl_module.named_parameters()
        self.anchors = {
            k: self.global_state[k].to(p.device) for k, p in parameters if k in self.global_state
        }

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None and id(parameter) in stepping and name in self.anchors:
                parameter.grad.add_(parameter.detach() - self.anchors[name], alpha=self.mu)
