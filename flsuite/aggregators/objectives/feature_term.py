"""Objectives that add a term of the features to the model's loss, or change its logits."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators.features import as_rows, features_at
from flsuite.aggregators.losses import is_other_loss
from flsuite.aggregators.objectives.base import Objective
from flsuite.errors import FlsuiteError
from flsuite.lightning_internals import scaler_of
from flsuite.messages import ClientContext
from flsuite.state import State


@dataclass(frozen=True)
class FeatureTerm(Objective):
    """A term of the features in the loss of every training step, or a change of its logits.

    Subclasses state both in functions of one client's tensors, which must not look at numbers. A
    stack of clients computes them for all at once. What differs between clients is what
    :meth:`read` returns.

    Args:
        head: Prefix of the head's entries in the state dict. The features are its input.
    """

    head: str

    def read(self, client: ClientContext, module: LightningModule) -> Any:
        """Return what the term reads of a client, in dictionaries of tensors. Default: nothing.

        Args:
            client: The client's view of the round.
            module: Its model at the start of the fit.
        """
        return {}

    def compared(self, features_of: Callable[[State], Tensor], held: Any) -> list[Tensor]:
        """Return features of the batch at other weights, which the term reads. Default: none.

        Args:
            features_of: Returns the features of the batch, ``(n, features)``, at given weights.
            held: What :meth:`read` has returned.
        """
        return []

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor | None:
        """Return the term, a mean over the samples of the batch. Default: none.

        Args:
            features: ``(n, features)``, with gradients.
            others: What :meth:`compared` has returned.
            batch: The batch.
            held: What :meth:`read` has returned.
        """
        return None

    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Tensor:
        """Return what the model's loss reads as the head's outputs. Default: the outputs.

        Args:
            outputs: ``(n, classes)``, with gradients.
            batch: The batch.
            held: What :meth:`read` has returned.
        """
        return outputs

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [FeatureCallback(client, self), *super().callbacks(client)]


class FeatureCallback(Callback):
    """Adds the term in a fit of one client.

    Only the gradient of the term is computed, where the gradient of the loss passes the features.
    The backward pass of the model therefore runs once.

    Args:
        client: The client's view of the round.
        objective: States the term.
    """

    def __init__(self, client: ClientContext, objective: FeatureTerm) -> None:
        self.client, self.objective = client, objective
        self._held: Any = {}
        self._batch: Any = ()
        self._others: list[Tensor] = []
        self._is_in_step = False
        self._is_called: bool | None = None  # the head, in the steps of this fit
        self._hooks = ExitStack()

    def begin(self, module: LightningModule) -> Any:
        """Return what the term reads of the client."""
        return self.objective.read(self.client, module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer, self._held = trainer, self.begin(pl_module)
        head = pl_module.get_submodule(self.objective.head.rstrip("."))
        for handle in (
            head.register_forward_pre_hook(self._look),
            head.register_forward_hook(self._change),
        ):
            self._hooks.callback(handle.remove)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        def features_of(weights: State) -> Tensor:
            head = self.objective.head
            return features_at(trainer, pl_module, head, weights, batch, batch_idx)

        self._batch, self._others = batch, self.objective.compared(features_of, self._held)
        self._is_in_step, self._is_called = True, bool(self._is_called)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Only now: LBFGS computes a loss several times, and checkpointed layers in the backward.
        self._is_in_step, self._batch = False, ()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()
        if self._is_called is False:
            raise FlsuiteError(
                f"this aggregator changes what {self.objective.head} reads or returns, and no "
                f"training step of {type(pl_module).__name__} calls it; choose another "
                "aggregator, or head"
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # The model is resident: a hook left on it would act in the next client's fit.
        self._hooks.close()

    @property
    def _is_own_loss(self) -> bool:
        """Return whether a forward pass is for the model's own loss. Others stay as they are."""
        return self._is_in_step and not is_other_loss()

    def _look(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._is_own_loss and inputs[0].requires_grad:
            features = inputs[0].detach().clone()  # the head may change its input in place
            inputs[0].register_hook(lambda gradient: gradient + self._at(features))

    def _change(self, head: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        if not self._is_own_loss:
            return outputs
        self._is_called = True
        return self.objective.logits(outputs, self._batch, self._held)

    def _at(self, features: Tensor) -> Tensor | float:
        """Return the gradient of the term, scaled like the loss of the step."""
        with torch.enable_grad():
            z = features.requires_grad_()
            term = self.objective.term(as_rows(z), self._others, self._batch, self._held)
            if term is None or not term.requires_grad:
                return 0.0
            (gradient,) = torch.autograd.grad(term, z)
        scaler = scaler_of(self._trainer)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return gradient * (scale / self._trainer.accumulate_grad_batches)
