"""Per-FedAvg: Fallah et al. 2020, algorithm 1, first-order and Hessian-free.

Personalized Federated Learning: A Meta-Learning Approach, arXiv:2002.07948.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import Parameter
from torch.optim import Optimizer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.losses import loss_at
from flsuite.aggregators.objectives import Objective
from flsuite.arguments import NonNegativeFloat, PositiveFloat, Settings
from flsuite.errors import FlsuiteError
from flsuite.lightning_internals import scaler_of
from flsuite.messages import ClientContext
from flsuite.state import State

Order = Literal["first", "hessian_free"]


class PerFedAvg(FedAvg):
    """Clients train a model that is good after one step of adaptation.

    Batches come in pairs. On the first one, ``w~ = w - alpha grad F(w)`` (line 7). On the second
    one, the model's optimizer steps from ``w`` with the gradient at ``w~`` (line 8). If a fit has
    an odd number of batches, the last one serves as both. The rate ``beta`` of the paper is the
    optimizer's. Clients are scored by the global model. Set ``trainer.adapt_epochs`` to score them
    after an adaptation, too, which takes whole epochs of the model's optimizer.

    Args:
        alpha: Rate of the adaptation step. With 0 this is FedAvg on every second batch.
        order: ``first`` leaves out the Hessian, as in FO-MAML. ``hessian_free`` approximates its
            product with the gradient by a difference of gradients, on the second batch (eq. 9).
            That takes two more gradients per pair.
        delta: Step of the difference.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        alpha: NonNegativeFloat = 0.01,
        order: Order = "first",
        delta: PositiveFloat = 1e-3,
        **kwargs: Any,
    ) -> None:
        self.alpha, self.order, self.delta = alpha, order, delta
        super().__init__(objective=MetaGradient(alpha, order, delta), **kwargs)


@dataclass(frozen=True)
class MetaGradient(Objective, Settings):
    """The gradient of the loss after one step of adaptation. See :class:`PerFedAvg`."""

    alpha: NonNegativeFloat = 0.01
    order: Order = "first"
    delta: PositiveFloat = 1e-3

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_Pairs(self)]


class _Pairs(Callback):
    def __init__(self, settings: MetaGradient) -> None:
        self.settings = settings
        self.start: State = {}  # w, while the model holds w~

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if scaler_of(trainer) is not None or trainer.accumulate_grad_batches != 1:
            raise FlsuiteError(
                "PerFedAvg steps on pairs of batches, without a gradient scaler; set "
                "trainer.precision to bf16-mixed, and leave out accumulate_grad_batches"
            )
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise FlsuiteError(
                "PerFedAvg needs one optimizer that Lightning steps; choose another model or "
                "aggregator"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batch = batch, batch_idx

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        own = {k: p for k, p in pl_module.named_parameters() if p.grad is not None}
        gradient = {name: torch.as_tensor(p.grad) for name, p in own.items()}
        if self.start:
            self._back_to_start(pl_module)
        elif not _is_last_step(trainer):
            self.start = {name: p.detach().clone() for name, p in own.items()}
            for name, parameter in own.items():
                parameter.data.sub_(gradient[name], alpha=self.settings.alpha)
                parameter.grad = None  # so that the optimizer leaves it
            return
        else:
            at = {k: p.detach() - self.settings.alpha * gradient[k] for k, p in own.items()}
            for name, value in self._gradient(trainer, pl_module, at).items():
                gradient[name].copy_(value)

        if self.settings.order == "hessian_free" and self.settings.alpha:
            product = self._hessian_product(trainer, pl_module, own, gradient)
            for name, value in gradient.items():
                value.sub_(product[name], alpha=self.settings.alpha)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._back_to_start(pl_module)  # of a pair that was cut off

    def _back_to_start(self, module: LightningModule) -> None:
        for name, parameter in module.named_parameters():
            if name in self.start:
                parameter.data.copy_(self.start[name])
        self.start = {}

    def _hessian_product(
        self,
        trainer: Trainer,
        module: LightningModule,
        own: dict[str, Parameter],
        gradient: State,
    ) -> State:
        """Return the Hessian times the gradient, by a central difference.

        Rounding to half precision would be larger than the difference.
        """
        delta = self.settings.delta
        plus, minus = (
            {k: torch.add(p.detach(), gradient[k], alpha=sign) for k, p in own.items()}
            for sign in (delta, -delta)
        )
        a, b = (self._gradient(trainer, module, at, in_full=True) for at in (plus, minus))
        return {k: (a[k] - b[k]) / (2 * delta) for k in own}

    def _gradient(
        self, trainer: Trainer, module: LightningModule, at: State, in_full: bool = False
    ) -> State:
        """Return the gradient of the loss on the current batch at other weights."""
        with torch.enable_grad():
            leaves = [value.requires_grad_() for value in at.values()]
            loss = loss_at(trainer, module, at, *self.batch, in_full=in_full)
            gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return dict(zip(at, gradients, strict=True))


def _is_last_step(trainer: Trainer) -> bool:
    is_last_epoch = trainer.current_epoch + 1 >= (trainer.max_epochs or 1)
    is_last_batch = trainer.is_last_batch and is_last_epoch
    return is_last_batch or trainer.global_step + 1 == trainer.max_steps
