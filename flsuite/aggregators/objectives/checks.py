"""Checks of what the functions of a client half return and leave unchanged."""

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.utils._pytree import tree_leaves

from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.part import ClientHalf, Part
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State


def wrong(part: Part, method: str, returned: Any, wanted: str) -> FlsuiteError:
    """Return the error of a function that has returned something else than it should.

    Args:
        part: The part.
        method: Name of its function.
        returned: What it has returned, or a text that says it.
        wanted: What it should return.
    """
    shape = f" of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else ""
    kind = "None" if returned is None else type(returned).__name__
    what = returned if isinstance(returned, str) else f"{kind}{shape}"
    return FlsuiteError(f"{type(part).__name__}.{method} returned {what}; return {wanted}")


def require_tensors(part: ClientHalf, method: str, held: Any) -> None:
    """Refuse what a function has returned if it does not consist of tensors.

    Raises:
        FlsuiteError: If it contains anything else.
    """
    for leaf in tree_leaves(held):
        if not isinstance(leaf, Tensor):
            wanted = "tensors in dictionaries, and leave out what a client does not have"
            raise wrong(part, method, leaf, wanted)


def require_entries(part: ClientHalf, method: str, given: Any, w: State) -> None:
    """Refuse a returned dictionary with entries that the weights do not have.

    Raises:
        FlsuiteError: If it has another entry, or an entry of another shape or dtype.
    """
    if not isinstance(given, Mapping):
        raise wrong(part, method, given, "a dictionary of entries of w")
    for name, value in given.items():
        own = w.get(name)
        if own is None:
            raise wrong(part, method, f"the entry {name}", f"entries of w alone ({', '.join(w)})")
        wanted = f"{name} of shape {tuple(own.shape)} and dtype {own.dtype}"
        if not isinstance(value, Tensor):
            raise wrong(part, method, value, wanted)
        if (value.shape, value.dtype) != (own.shape, own.dtype):
            returned = f"{name} of shape {tuple(value.shape)} and dtype {value.dtype}"
            raise wrong(part, method, returned, wanted)


def own_entries_of(
    objective: Objective,
    state: State,
    received: dict[str, Any],
    memory: dict[str, Any],
    model: State,
) -> State:
    """Return the entries of a client's own model, see :meth:`Objective.own_entries`.

    Args:
        objective: The objective.
        state: The shared part of the global model.
        received: What the objective broadcasts.
        memory: The client's notes.
        model: All entries of the model.

    Raises:
        FlsuiteError: If the objective returns something else, or changes what it reads.
    """
    with no_change_in_place(objective, [state, received, memory]):
        own = objective.own_entries(state, received, memory)
    require_entries(objective, "own_entries", own, model)
    return own


@contextmanager
def no_change_in_place(reader: Any, held: Any) -> Iterator[None]:
    """Refuse changes of what a part or a model reads, which others may read, too.

    Args:
        reader: The part or the model.
        held: What it reads.

    Raises:
        FlsuiteError: If a tensor has changed in place, or has been replaced in its dictionary.
    """
    before = [(leaf, _version(leaf)) for leaf in _leaves(held)]
    yield
    after = _leaves(held)
    if len(after) != len(before) or any(
        new is not old or _version(new) != version
        for new, (old, version) in zip(after, before, strict=True)
    ):
        raise FlsuiteError(
            f"{type(reader).__name__} changes in place what it is given: w, held, a gradient, a "
            "batch, a model, or what the server sends; make new tensors, leave the dictionaries as "
            "they are, and measure in evaluation mode"
        )


@contextmanager
def no_other_draws(what: str) -> Iterator[None]:
    """Refuse draws from Python's or NumPy's generator: all clients of a stack would share them.

    Args:
        what: What must not draw, for the message.

    Raises:
        FlsuiteError: If it does.
    """
    before = random.getstate(), pickle.dumps(np.random.get_state())
    yield
    if before != (random.getstate(), pickle.dumps(np.random.get_state())):
        raise FlsuiteError(f"{what} draws from random or numpy; draw from torch instead")


def storages(tree: Any) -> set[int]:
    """Return where the dense tensors of a tree lie in memory, also under ``torch.vmap``."""
    tensors = (_unwrapped(leaf) for leaf in _leaves(tree) if isinstance(leaf, Tensor))
    dense = (one for one in tensors if one.layout == torch.strided and one.numel())
    return {one.untyped_storage().data_ptr() for one in dense}


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree. On plain dictionaries, torch's own function is slow."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) not in (dict, list, tuple):
        return tree_leaves(tree)
    leaves: list[Any] = []
    for part in tree.values() if type(tree) is dict else tree:
        if isinstance(part, Tensor):  # most are
            leaves.append(part)
        else:
            leaves += _leaves(part)
    return leaves


def _version(leaf: Any) -> int:
    """Return the number of changes in place, also of a tensor under ``torch.vmap``."""
    return _unwrapped(leaf)._version if isinstance(leaf, Tensor) else 0


def _unwrapped(leaf: Tensor) -> Tensor:
    while is_batchedtensor(leaf):
        leaf = get_unwrapped(leaf)
    return leaf
