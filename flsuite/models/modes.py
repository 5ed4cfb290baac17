"""Context managers that change a module's training and evaluation modes and restore them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """Restore the ``training`` flag of every submodule on exit, even after an exception.

    ``module.train(mode)`` would set one mode for all submodules, but a submodule may differ from
    its parent: a frozen copy stays in evaluation mode during training.
    """
    # Set the flag itself, because train() changes submodules and may be overridden.
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of every submodule on exit."""
    with kept_modes(module):
        module.eval()
        yield
