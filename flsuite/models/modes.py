"""Context managers that change the training and evaluation modes of a module and restore them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """Restore the ``training`` flag of every submodule at the end, after an exception too.

    ``module.train(mode)`` would give all submodules one mode, and a submodule may have another than
    its parent: a frozen copy stays in evaluation mode during training.
    """
    # The flag itself, and no call of train(): that would change submodules and may be overridden.
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside and restore the mode of every submodule at the end."""
    with kept_modes(module):
        module.eval()
        yield
