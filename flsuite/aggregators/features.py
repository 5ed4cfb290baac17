"""Terms on a model's features: the input of its head in a training step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


@contextmanager
def inputs_of(model: nn.Module, head: str) -> Iterator[list[Tensor]]:
    """Collect what a part of a model reads in each forward pass.

    Args:
        model: The model.
        head: Prefix of the part's entries in the state dict.
    """
    seen: list[Tensor] = []
    part = model.get_submodule(head.rstrip("."))
    # A copy, because the part may change its input in place.
    handle = part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    try:
        yield seen
    finally:
        handle.remove()


def features_at(
    trainer: Trainer,
    module: LightningModule,
    head: str,
    weights: Mapping[str, Tensor],
    batch: Any,
    index: int | Tensor,
) -> Tensor:
    """Return what a head reads at other weights, ``(n, features)``, without gradients.

    The weights do not change. The other arguments are those of :func:`~losses.loss_at`.

    Args:
        head: Prefix of the head's entries in the state dict.

    Raises:
        FlsuiteError: If a training step does not call the head.
    """
    buffers = {name for name, _ in module.named_buffers()}
    at = {name: value.clone() if name in buffers else value for name, value in weights.items()}
    with torch.no_grad(), inputs_of(module, head) as seen:
        loss_at(trainer, module, at, batch, index)
    if not seen:
        raise FlsuiteError(
            f"this aggregator reads the input of {head}, which a training step of "
            f"{type(module).__name__} does not call; choose another aggregator, or head"
        )
    return as_rows(seen[-1])


def as_rows(features: Tensor) -> Tensor:
    """Return features as ``(n, features)``, in float32 or more."""
    return features.flatten(1).to(torch.promote_types(features.dtype, torch.float32))


class FeatureTerm(Callback, ABC):
    """Adds a term of the features to the loss of every training step.

    Subclasses state the term in functions of one client's tensors. In a stack of clients, one
    callback computes the terms of all, so these functions must not look at numbers.

    In a fit of one client, only the gradient of the term is computed, where the gradient of the
    loss passes the features. The backward pass of the model therefore runs once.

    Args:
        head: Prefix of the head's entries in the state dict.

    Attributes:
        held: What the term reads of its client, see :meth:`start`.
    """

    supports_stack = True

    def __init__(self, head: str) -> None:
        self.head = head
        self.held: Any = {}
        self._batch: Any = ()
        self._others: list[Tensor] = []
        self._handle: Any = None

    def start(self, module: LightningModule) -> Any:
        """Return what the term reads of its client, in dictionaries of tensors. Default: nothing.

        Args:
            module: The model at the start of the fit.
        """
        return {}

    def compared(self, features_of: Callable[[State], Tensor], held: Any) -> list[Tensor]:
        """Return features of the batch at other weights, which the term reads. Default: none.

        Args:
            features_of: Returns the features of the batch, ``(n, features)``, at given weights.
            held: See :meth:`start`.
        """
        return []

    @abstractmethod
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        """Return the term, a mean over the samples of the batch.

        Args:
            features: ``(n, features)``, with gradients.
            others: See :meth:`compared`.
            batch: The batch.
            held: See :meth:`start`.
        """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer
        self.held = self.start(pl_module)
        head = pl_module.get_submodule(self.head.rstrip("."))
        self._handle = head.register_forward_pre_hook(self._look)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        def features_of(weights: State) -> Tensor:
            return features_at(trainer, pl_module, self.head, weights, batch, batch_idx)

        self._batch, self._others = batch, self.compared(features_of, self.held)

    def _look(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            features = inputs[0].detach().clone()  # the head may change its input in place
            inputs[0].register_hook(lambda gradient: gradient + self._at(features))

    def _at(self, features: Tensor) -> Tensor:
        """Return the gradient of the term, scaled like the loss of the step."""
        with torch.enable_grad():
            z = features.requires_grad_()
            term = self.term(as_rows(z), self._others, self._batch, self.held)
            (gradient,) = torch.autograd.grad(term, z)
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
