"""pFedMe: Dinh et al. 2020, algorithm 1.

Personalized Federated Learning with Moreau Envelopes, arXiv:2006.08848.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import SGD, Optimizer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives import Objective
from flsuite.aggregators.second_model import SecondModel, pulled, start_of
from flsuite.arguments import PositiveFloat, PositiveInt, Settings
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext
from flsuite.state import State, difference


class PFedMe(FedAvg):
    """Clients minimize the Moreau envelope of their loss, and predict with its proximal point.

    For each batch, ``steps`` steps of gradient descent at ``personal_lr`` approach ``theta``, the
    minimizer of ``F_k(theta) + lam / 2 ||theta - w_k||^2`` (eq. 3). Then the model's optimizer
    takes one step with the gradient of the envelope, ``lam (w_k - theta)`` (line 8). The server
    moves to ``(1 - beta) w + beta mean(w_k)`` (line 12). A client is scored by its last ``theta``.

    A fit costs ``steps + 1`` fits of FedAvg. The bytes are the same.

    Args:
        lam: Weight of the proximal term, ``lambda``. The optimizer's rate times ``lam`` should be
            below 1.
        steps: Steps per batch, ``K``.
        personal_lr: Learning rate of these steps.
        beta: The server's step.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        lam: PositiveFloat = 15.0,
        steps: PositiveInt = 5,
        personal_lr: PositiveFloat = 0.05,
        beta: PositiveFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        self.lam, self.steps, self.personal_lr, self.beta = lam, steps, personal_lr, beta
        if beta != 1.0:
            if kwargs.get("server_optimizer") is not None:
                raise FlsuiteError(
                    "PFedMe: beta is the step of plain averaging; leave out beta or "
                    "server_optimizer"
                )
            kwargs["server_optimizer"] = partial(SGD, lr=beta)
        super().__init__(objective=MoreauEnvelope(lam, steps, personal_lr), **kwargs)


@dataclass(frozen=True)
class MoreauEnvelope(Objective, Settings):
    """The gradient of the Moreau envelope, in place of the loss's own. See :class:`PFedMe`."""

    lam: PositiveFloat = 15.0
    steps: PositiveInt = 5
    personal_lr: PositiveFloat = 0.05

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_EnvelopeSteps(client, self)]

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("personal", {})


class _EnvelopeSteps(Callback):
    def __init__(self, client: ClientContext, settings: MoreauEnvelope) -> None:
        self.client, self.settings = client, settings

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.theta = SecondModel(trainer, pl_module, start_of(self.client, pl_module, None))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Approach the proximal point of ``w_k``, from the one of the previous batch."""
        w = self._own(pl_module)
        for _ in range(self.settings.steps):
            theta = {name: value.detach() for name, value in self.theta.parameters.items()}
            own = self.theta.gradient(batch, batch_idx)
            gradient = pulled(own, difference(theta, w), self.settings.lam)
            for name, value in theta.items():
                value.sub_(gradient[name], alpha=self.settings.personal_lr)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in pl_module.named_parameters():
            if name in self.theta.parameters and id(parameter) in stepping:
                theta = self.theta.parameters[name].detach()
                parameter.grad = self.settings.lam * (parameter.detach() - theta)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.client.memory["personal"] = self.theta.state()

    def _own(self, module: LightningModule) -> State:
        own = dict(module.named_parameters())
        return {name: own[name].detach() for name in self.theta.parameters}
