"""Keeps the state of a module that is not in its state dict: modes, and plain attributes."""

import copy
import pickle
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import singledispatch
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


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


_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque, tuple)
_GENERATORS = (torch.Generator, np.random.Generator, random.Random)
_KEPT = (*_PLAIN, *_CONTAINERS, *_GENERATORS, Tensor, nn.Module)
_LIBRARIES = ("torch.", "torchvision.", "torchmetrics.")  # their layers keep nothing here
_OF_LIGHTNING = {*vars(LightningModule()), "autograd_grad_sample_hooks"}  # the handles of Opacus


class PlainAttributes:
    """The attributes of a module and its parts that are plain data: numbers, lists, tensors, ...

    Parameters, buffers and submodules are left out, also as parts of a list, and so are the private
    attributes of flsuite's own classes. Of all other objects, only random generators count, and
    modules that are not registered as submodules.

    Args:
        module: The module. What it has now is kept.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        tensors = ({**part._parameters, **part._buffers}.values() for part in parts)
        self._registered = {*map(id, chain(parts, *tensors))}
        self._parts = _own_parts(module)
        self._kept = [
            {name: self._copied(value) for name, value in _plain_of(part).items()}
            for part in self._parts
        ]

    def restore(self) -> None:
        """Give the attributes their values back, and remove those that are new."""
        for part, kept in zip(self._parts, self._kept, strict=True):
            for name in _changed(part, kept):
                if name in kept:
                    vars(part)[name] = self._copied(kept[name])
                else:
                    del vars(part)[name]

    def changed(self, other: nn.Module | None = None) -> list[str]:
        """Return the names of attributes that have another value now, or are new.

        Args:
            other: Another module of the same structure, whose attributes count instead.
        """
        pairs = zip(_own_parts(other) if other else self._parts, self._kept, strict=True)
        return [name for part, kept in pairs for name in _changed(part, kept)]

    def _copied(self, value: Any) -> Any:
        """Return a copy. Registered tensors and modules in it, and other objects, stay the same."""
        if id(value) in self._registered:
            return value
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, (nn.Module, *_GENERATORS)):
            return copy.deepcopy(value)
        if isinstance(value, tuple):
            parts = [self._copied(part) for part in value]
            is_same = all(a is b for a, b in zip(parts, value, strict=True))
            return value if is_same else tuple(parts)
        if not isinstance(value, _CONTAINERS):
            return value
        own: Any = copy.copy(value)  # of the same class
        if isinstance(value, dict):
            own.update({key: self._copied(part) for key, part in value.items()})
        elif isinstance(value, (list, deque)):
            own.clear()
            own.extend(map(self._copied, value))
        return own


def _own_parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and its parts, without the layers of libraries."""
    parts = module.modules()
    return [part for part in parts if not type(part).__module__.startswith(_LIBRARIES)]


def _plain_of(part: nn.Module) -> dict[str, Any]:
    """Return a part's attributes that count."""
    is_ours = type(part).__module__.startswith("flsuite.")
    return {
        name: value
        for name, value in vars(part).items()
        if name not in _OF_LIGHTNING
        and not (is_ours and name.startswith("_"))
        and isinstance(value, _KEPT)
    }


def _changed(part: nn.Module, kept: dict[str, Any]) -> list[str]:
    """Return the names of a part's attributes that differ from the kept ones."""
    own = vars(part)
    differing = [name for name, value in kept.items() if _differs(own.get(name), value)]
    return differing + [name for name in _plain_of(part) if name not in kept]


# What shows a change of a hidden module or of a generator. Other data shows it itself.
_content = singledispatch(lambda value: value)
_content.register(nn.Module, lambda module: dict(module.state_dict()))
_content.register(torch.Generator, torch.Generator.get_state)
_content.register(np.random.Generator, lambda numpy: pickle.dumps(numpy.bit_generator.state))
_content.register(random.Random, random.Random.getstate)


def _differs(now: Any, before: Any) -> bool:
    """Return whether plain data has other values than before. Other objects do not count."""
    if now is before or not isinstance(before, _KEPT):
        return False
    if now.__class__ != before.__class__:
        return True
    now, before = _content(now), _content(before)
    if isinstance(before, Tensor):
        is_alike = now.shape == before.shape and now.dtype == before.dtype
        return not (is_alike and torch.equal(now.detach().to(before.device), before.detach()))
    if isinstance(before, dict):
        return now.keys() != before.keys() or any(_differs(now[k], before[k]) for k in before)
    if isinstance(before, (list, tuple, deque)):
        return len(now) != len(before) or any(map(_differs, now, before))
    return bool(now != before)
