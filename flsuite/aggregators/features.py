"""Terms on a model's features: the input of its head in a training step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators.losses import is_other_loss, loss_at
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


@contextmanager
def outputs_of(model: nn.Module, head: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what a part of a model returns in each forward pass.

    Args:
        model: The model.
        head: Prefix of the part's entries in the state dict.
        change: Returns other outputs.
    """
    part = model.get_submodule(head.rstrip("."))
    handle = part.register_forward_hook(lambda _, inputs, outputs: change(outputs))
    try:
        yield
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


class FeatureTerm(Callback):
    """Adds a term of the features to the loss of every training step, or changes its logits.

    Subclasses state both in functions of one client's tensors. In a stack of clients, one callback
    computes the terms of all, so these functions must not look at numbers.

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
        self._is_in_step = False
        self._is_called: bool | None = None  # the head, in the steps of this fit
        self._hooks = ExitStack()

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

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor | None:
        """Return the term, a mean over the samples of the batch. Default: none.

        Args:
            features: ``(n, features)``, with gradients.
            others: See :meth:`compared`.
            batch: The batch.
            held: See :meth:`start`.
        """
        return None

    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Tensor:
        """Return what the model's loss reads as the head's outputs. Default: the outputs.

        Args:
            outputs: ``(n, classes)``, with gradients.
            batch: The batch.
            held: See :meth:`start`.
        """
        return outputs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer
        self.held = self.start(pl_module)
        head = pl_module.get_submodule(self.head.rstrip("."))
        for handle in (
            head.register_forward_pre_hook(self._look),
            head.register_forward_hook(self._change),
        ):
            self._hooks.callback(handle.remove)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        def features_of(weights: State) -> Tensor:
            return features_at(trainer, pl_module, self.head, weights, batch, batch_idx)

        self._batch, self._others = batch, self.compared(features_of, self.held)
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
        return self.logits(outputs, self._batch, self.held)

    def _at(self, features: Tensor) -> Tensor | float:
        """Return the gradient of the term, scaled like the loss of the step."""
        with torch.enable_grad():
            z = features.requires_grad_()
            term = self.term(as_rows(z), self._others, self._batch, self.held)
            if term is None or not term.requires_grad:
                return 0.0
            (gradient,) = torch.autograd.grad(term, z)
        scaler = scaler_of(self.trainer)
        scale = 1.0 if scaler is None else scaler.get_scale()
        return gradient * (scale / self.trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hooks.close()
        if self._is_called is False:
            raise FlsuiteError(
                f"this aggregator changes what {self.head} reads or returns, and no training step "
                f"of {type(pl_module).__name__} calls it; choose another aggregator, or head"
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # The model is resident: a hook left on it would act in the next client's fit.
        self._hooks.close()
