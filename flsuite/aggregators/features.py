"""Terms on a model's features: the input of its head in a training step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators.losses import loss_at
from flsuite.errors import FlsuiteError
from flsuite.lightning_internals import scaler_of
from flsuite.state import State


def classes_of(batch: Any, method: str) -> Tensor:
    """Return the classes of a batch, ``(n,)``.

    Raises:
        FlsuiteError: If it does not hold inputs and one class per sample.
    """
    y = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    if isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point():
        return y
    raise FlsuiteError(
        f"{method} needs batches of inputs and classes, one class per sample; choose other data or "
        "another aggregator"
    )


def shape_of(model: LightningModule, head: str) -> tuple[int, int]:
    """Return a head's numbers of outputs and of inputs.

    Raises:
        FlsuiteError: If its first layer is not linear.
    """
    parts = list(model.get_submodule(head.rstrip(".")).modules())
    layers = [layer for layer in parts if any(True for _ in layer.parameters(recurse=False))]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if linear and linear[0] is layers[0]:
        return linear[-1].out_features, linear[0].in_features
    raise FlsuiteError(
        f"this aggregator reads the inputs of {head}, whose first layer must be linear; set head"
    )


class FeatureTerm(Callback, ABC):
    """Adds a term of the features to the loss of every training step.

    Only the gradient of the term is computed, where the gradient of the loss passes the features.
    The backward pass of the model therefore runs once.

    Args:
        head: Prefix of the head's entries in the state dict.

    Attributes:
        batch: The batch of the current step, on the model's device, and its number.
    """

    def __init__(self, head: str) -> None:
        self.head = head
        self.batch: tuple[Any, int] = ((), 0)
        self._handle: Any = None
        self._seen: Tensor | None = None
        self._only_looks = False

    @abstractmethod
    def term(self, features: Tensor) -> Tensor:
        """Return the term, a mean over the samples of the batch.

        Args:
            features: ``(n, features)``, with gradients.
        """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer, self.module = trainer, pl_module
        head = pl_module.get_submodule(self.head.rstrip("."))
        self._handle = head.register_forward_pre_hook(self._look)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batch = batch, batch_idx

    def features_at(self, weights: State) -> Tensor:
        """Return the features of the current batch at other weights, ``(n, features)``."""
        self._only_looks = True
        try:
            with torch.no_grad():
                loss_at(self.trainer, self.module, weights, *self.batch)
        finally:
            self._only_looks = False
        if self._seen is None:
            raise FlsuiteError(
                f"this aggregator reads the input of {self.head}, which a training step of "
                f"{type(self.module).__name__} does not call; choose another aggregator, or head"
            )
        seen, self._seen = self._seen, None
        return seen.flatten(1).float()

    def _look(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._only_looks:
            self._seen = inputs[0].detach().clone()
        elif inputs[0].requires_grad:
            features = inputs[0].detach().clone()  # the head may change its input in place
            inputs[0].register_hook(lambda gradient: gradient + self._at(features))

    def _at(self, features: Tensor) -> Tensor:
        """Return the gradient of the term, scaled like the loss of the step."""
        with torch.enable_grad():
            z = features.requires_grad_()
            (gradient,) = torch.autograd.grad(self.term(z.flatten(1).float()), z)
        scaler = scaler_of(self.trainer)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return gradient * (scale / self.trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._handle.remove()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # The model is resident: a hook left on it would act in the next client's fit.
        if self._handle is not None:
            self._handle.remove()
