"""The modes and plain attributes of a module are restored."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from flsuite.models.modes import PlainAttributes, evaluating, kept_modes


def mixed() -> nn.Sequential:
    """A module in training mode with one submodule in evaluation mode."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)))
    module[1][1].eval()
    return module


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.parametrize("keep", [kept_modes, evaluating])
@pytest.mark.parametrize("fails", [False, True])
def test_every_submodule_keeps_its_own_mode_after_an_exception_too(keep: Any, fails: bool) -> None:
    module = mixed()
    before = modes(module)

    with suppress(ZeroDivisionError), keep(module):
        module.train()
        module[0].eval()
        if fails:
            raise ZeroDivisionError

    assert modes(module) == before


def test_evaluating_sets_evaluation_mode_and_kept_modes_sets_none() -> None:
    module = mixed()
    before = modes(module)

    with evaluating(module):
        assert not any(modes(module))
        assert torch.equal(module[1][0](torch.ones(4)), torch.ones(4))
    with kept_modes(module):
        assert modes(module) == before


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self._first = 0, None  # type: int, Tensor | None
        self.linear = nn.Linear(2, 2)
        self.layers, self.center = [self.linear], torch.ones(2)
        self.draws = torch.Generator().manual_seed(1)


class Remembering(LightningModule):
    def __init__(self, tau: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self._steps, self.recent = Layer(), 0, deque([1])
        self.pair = (1, [2])
        self.numbers, self.python = np.random.default_rng(1), random.Random(1)
        vars(self)["hidden"] = nn.Linear(2, 2)


CHANGES: dict[str, Callable[[Remembering], Any]] = {
    "of a part": lambda m: setattr(m.layer, "calls", 1),
    "private": lambda m: setattr(m, "_steps", 1),
    "new": lambda m: setattr(m.layer, "seen", 1),
    "none at first": lambda m: setattr(m.layer, "_first", torch.ones(1)),
    "tensor": lambda m: m.layer.center.add_(1),
    "deque": lambda m: m.recent.append(2),
    "list in a tuple": lambda m: m.pair[1].append(3),
    "hyperparameter": lambda m: m.hparams.update(tau=0.5),
    "hidden module": lambda m: m.hidden.weight.data.add_(1),
    "torch": lambda m: torch.rand(1, generator=m.layer.draws),
    "numpy": lambda m: m.numbers.random(),
    "random": lambda m: m.python.random(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_plain_attributes_are_restored(change: Callable[[Remembering], Any]) -> None:
    model = Remembering()
    kept = PlainAttributes(model)
    assert not kept.changed()
    for _ in range(2):
        change(model)
        assert kept.changed()
        kept.restore()
        assert not kept.changed()


def test_parameters_in_a_list_are_no_attributes() -> None:
    model = Remembering()
    kept = PlainAttributes(model)
    model.layer.linear.weight.data.add_(1)
    model.layer.layers.append(nn.Linear(1, 1))
    kept.restore()
    assert model.layer.layers[0] is model.layer.linear and len(model.layer.layers) == 1
