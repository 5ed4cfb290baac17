"""A model's features: the input of its head in a training step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from flsuite.aggregators.losses import loss_at
from flsuite.common.errors import FlsuiteError


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
    with part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone())):
        yield seen


@contextmanager
def outputs_of(model: nn.Module, head: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what a part of a model returns in each forward pass.

    Args:
        model: The model.
        head: Prefix of the part's entries in the state dict.
        change: Returns other outputs.
    """
    part = model.get_submodule(head.rstrip("."))
    with part.register_forward_hook(lambda _, inputs, outputs: change(outputs)):
        yield


def features_at(
    trainer: Trainer,
    module: LightningModule,
    head: str,
    weights: Mapping[str, Tensor],
    batch: Any,
    index: int | Tensor,
) -> Tensor:
    """Return what a head reads at other weights, ``(n, features)``, without gradients.

    The weights do not change. For the other arguments, see :func:`~losses.loss_at`.

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
