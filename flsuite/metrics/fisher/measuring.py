"""The conditions under which a trained model is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from flsuite.models import modes


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Compute in evaluation mode and float32, with gradients.

    At the end, the modes and the random generators are restored.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    float32 = torch.autocast(device.type, enabled=False)
    # isolate_rng: the pass must not change the numbers that the run draws after it.
    with modes.evaluating(module), isolate_rng(), torch.enable_grad(), float32:
        yield


# Channels below which channels_last is the slower format on a CPU: it fills less than a vector.
_NARROW = 16


@contextmanager
def fast_formats(module: nn.Module) -> Iterator[None]:
    """Hold the weights of convolutions with few input channels in the contiguous format inside.

    In channels_last, the gradient at the input of such a layer takes twice as long on a CPU.
    """
    kept = {
        layer.weight: layer.weight.data
        for layer in module.modules()
        if isinstance(layer, nn.Conv2d)
        and layer.weight.shape[1] < _NARROW
        and layer.weight.device.type == "cpu"
    }
    try:
        for weight, value in kept.items():
            # Not contiguous(): with one channel, both formats pass for each other.
            weight.data = value.clone(memory_format=torch.contiguous_format)
        yield
    finally:
        for weight, value in kept.items():
            weight.data = value
