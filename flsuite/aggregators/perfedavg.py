"""Per-FedAvg: Fallah et al. 2020, algorithm 1, first-order and Hessian-free.

Personalized Federated Learning: A Meta-Learning Approach, arXiv:2002.07948.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.losses import hessian_product, loss_and_gradient
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.optimizers import about_to_step
from flsuite.aggregators.part import ClientHalf
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import scaler_of
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, load_


class PerFedAvg(FedAvg):
    """Clients train a model that is good after one step of adaptation.

    Batches come in pairs. On the first one, ``w~ = w - alpha grad F(w)`` (line 7). On the second
    one, the model's optimizer steps from ``w`` with the gradient at ``w~`` (line 8). If a fit has
    an odd number of batches, the last one serves as both. The rate ``beta`` of the paper is the
    optimizer's. The paper weights all clients equally: set ``weighting`` to ``uniform`` for this.
    Clients are scored by the global model. Set ``trainer.adapt_epochs`` to score them after an
    adaptation, too, which takes whole epochs of the model's optimizer.

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

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_Pairs(client, self)]


class _Pairs(ClientHalf):
    part: MetaGradient

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start: State = {}  # w, while the model holds w~
        is_simple = pl_module.automatic_optimization and len(trainer.optimizers) == 1
        if not is_simple or scaler_of(trainer) or trainer.accumulate_grad_batches != 1:
            raise FlsuiteError(
                "PerFedAvg steps once per two batches, with one optimizer and no scaler; set "
                "precision to bf16-mixed, leave out accumulate_grad_batches, or change the model"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.is_last_epoch = trainer.current_epoch + 1 >= (trainer.max_epochs or 1)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batch = batch, batch_idx

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        stepping = list(about_to_step(optimizer, pl_module.named_parameters()))
        own = {name: p for name, p, _ in stepping}
        gradient = {name: g for name, _, g in stepping}
        if self.start:
            self._back_to_start(pl_module)
        elif not self._is_last_step(trainer):
            self.start = {name: p.detach().clone() for name, p in own.items()}
            for name, parameter in own.items():
                parameter.data.sub_(gradient[name], alpha=self.part.alpha)
                parameter.grad = None  # so that the optimizer leaves it
            return
        else:
            at = {k: p.detach() - self.part.alpha * gradient[k] for k, p in own.items()}
            for name, value in self._gradient(trainer, pl_module, at).items():
                gradient[name].copy_(value)

        if self.part.order == "hessian_free" and self.part.alpha:
            full = partial(self._gradient, trainer, pl_module, in_full=True)
            product = hessian_product(full, own, gradient, self.part.delta)
            for name, value in gradient.items():
                value.sub_(product[name], alpha=self.part.alpha)

    def _is_last_step(self, trainer: Trainer) -> bool:
        is_last = trainer.is_last_batch and self.is_last_epoch
        return is_last or trainer.global_step + 1 == trainer.max_steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._back_to_start(pl_module)  # of a pair that was cut off

    def _back_to_start(self, module: LightningModule) -> None:
        load_(module.state_dict(), self.start)
        self.start = {}

    def _gradient(
        self, trainer: Trainer, module: LightningModule, at: State, in_full: bool = False
    ) -> State:
        """Return the gradient of the loss on the current batch at other weights."""
        _, used = loss_and_gradient(trainer, module, at, *self.batch, in_full=in_full)
        return {name: used.get(name, torch.zeros_like(value)) for name, value in at.items()}
