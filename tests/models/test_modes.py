"""Context managers restore the modes of a module."""

import pytest
import torch
from torch import nn

from flsuite.models.modes import evaluating, kept_modes


def mixed() -> nn.Sequential:
    """A module in training mode with one submodule in evaluation mode."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)))
    module[1][1].eval()
    return module


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.parametrize("keep", [kept_modes, evaluating])
def test_every_submodule_keeps_its_own_mode(keep) -> None:
    module = mixed()
    before = modes(module)

    with keep(module):
        module.train()
        module[0].eval()

    assert modes(module) == before


@pytest.mark.parametrize("keep", [kept_modes, evaluating])
def test_modes_are_restored_after_an_exception(keep) -> None:
    module = mixed()
    before = modes(module)

    def fail() -> None:
        with keep(module):
            module.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert modes(module) == before


def test_evaluating_sets_evaluation_mode_and_kept_modes_sets_none() -> None:
    module = mixed()
    before = modes(module)

    with evaluating(module):
        assert not any(modes(module))
        assert torch.equal(module[1][0](torch.ones(4)), torch.ones(4))
    with kept_modes(module):
        assert modes(module) == before
