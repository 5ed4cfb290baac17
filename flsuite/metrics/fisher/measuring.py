"""Context managers for measuring a trained model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from flsuite.models import modes


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Compute in evaluation mode and float32, with gradients.

    The modes and the random generators are restored on exit.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    float32 = torch.autocast(device.type, enabled=False)
    # isolate_rng, because the pass must not affect later random draws.
    with modes.evaluating(module), isolate_rng(), torch.enable_grad(), float32:
        yield


# With fewer channels, channels_last is slower on a CPU: it does not fill a vector.
_NARROW = 16


@contextmanager
def fast_formats(module: nn.Module) -> Iterator[None]:
    """Hold the weights of convolutions with few input channels in contiguous format in the block.

    In channels_last, the input gradient of such a layer takes twice as long on a CPU.
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
            # Not contiguous(), because with one channel a tensor counts as being in both formats.
            weight.data = value.clone(memory_format=torch.contiguous_format)
        yield
    finally:
        for weight, value in kept.items():
            weight.data = value
