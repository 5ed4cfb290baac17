"""The term of the features in one client's fit."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators.losses import is_other_loss
from flsuite.aggregators.objectives.checks import no_change_in_place
from flsuite.aggregators.objectives.feature_term import (
    FeatureTerm,
    compared_of,
    features_at,
    logits_of,
    refuse_mixed_samples,
    term_gradient,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import scaler_of
from flsuite.common.state import State


class TermHooks:
    """Adds the term in a fit of one client.

    Only the gradient of the term is computed, where the gradient of the loss passes the features.
    The backward pass of the model therefore runs once.

    Args:
        objective: States the term.
        trainer: The Trainer of the fit.
        module: The model.
    """

    def __init__(self, objective: FeatureTerm, trainer: Trainer, module: LightningModule) -> None:
        self.objective, self._trainer, self._module = objective, trainer, module
        self._held: Any = {}
        self._batch: Any = ()
        self._others: list[Tensor] = []
        self._is_in_step = False
        self._is_called: bool | None = None  # the head, in the steps of this fit
        self._hooks, self._step = ExitStack(), ExitStack()
        self._head = objective.head_in(module)
        head = module.get_submodule(self._head.rstrip("."))
        self._hooks.enter_context(head.register_forward_pre_hook(self._look))
        self._hooks.enter_context(head.register_forward_hook(self._change))

    def begin_step(self, batch: Any, index: int, held: Any) -> None:
        """Begin a step on a batch.

        Args:
            batch: The batch.
            index: Its number in the epoch.
            held: What the steps hold.
        """
        self._held = held

        def features_of(weights: State, batch: Any = batch) -> Tensor:
            at = self._trainer, self._module, self._head, weights, batch
            return features_at(*at, index)

        self._step.enter_context(no_change_in_place(self.objective, held))
        self._batch = batch
        self._others = compared_of(self.objective, features_of, held)
        if index == 0 and hasattr(self._module, "autograd_grad_sample_hooks"):  # DPSGD's
            refuse_mixed_samples(self.objective, features_of, batch, held)
        self._is_in_step, self._is_called = True, bool(self._is_called)

    def end_step(self) -> None:
        """End a step."""
        # Only now: LBFGS computes a loss several times, and checkpointed layers in the backward.
        self._is_in_step, self._batch = False, ()
        self._step.close()

    def close(self) -> None:
        """Remove the hooks from the model, which is resident."""
        self._hooks.close()

    def require_called(self) -> None:
        """Refuse a model whose steps have not called the head.

        Raises:
            FlsuiteError: If no step has.
        """
        if self._is_called is False:
            raise FlsuiteError(
                f"this aggregator changes what {self._head} reads or returns, and no "
                f"training step of {type(self._module).__name__} calls it; choose another "
                "aggregator, or head"
            )

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
        return logits_of(self.objective, outputs, self._batch, self._held)

    def _at(self, features: Tensor) -> Tensor:
        """Return the gradient of the term, scaled like the loss of the step."""
        own = self._others, self._batch, self._held
        gradient = term_gradient(self.objective, features, *own)
        scaler = scaler_of(self._trainer)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return gradient * (scale / self._trainer.accumulate_grad_batches)
