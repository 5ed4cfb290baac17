"""Saves the state of a module besides its tensors: modes, and plain Python attributes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


_OTHERS = ("training", "autograd_grad_sample_hooks")  # a mode, and the handles of Opacus


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return copies of the module's attributes that are plain Python data."""
    kinds = (bool, int, float, str, list, dict, set)
    return {
        name: copy.deepcopy(value)
        for name, value in vars(module).items()
        if type(value) in kinds and not name.startswith("_") and name not in _OTHERS
    }
