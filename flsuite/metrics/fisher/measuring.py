"""The conditions under which a trained model is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from flsuite.models import modes

__all__ = ["measuring"]


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
