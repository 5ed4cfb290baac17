"""A check that the parts of an algorithm keep no state in their attributes."""

import copyreg
import io
import pickle
from inspect import getattr_static, ismemberdescriptor, isroutine
from types import FunctionType
from typing import Any

import torch
from torch import nn

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.part import Part
from flsuite.common.errors import FlsuiteError


class StateCheck:
    """Refuses parts whose attributes, or those of their classes, change in a run.

    All clients share a part, and a resumed run makes a new one. Parts of flsuite have no state.

    Args:
        aggregator: The algorithm, at the start of the run.
    """

    def __init__(self, aggregator: Aggregator) -> None:
        parts = (aggregator.rule, aggregator.objective, *aggregator.transforms)
        own = [part for part in parts if not type(part).__module__.startswith("flsuite.")]
        self._before = [(part, _attributes(part)) for part in own]

    def check(self, where: str, memory: str) -> None:
        """Refuse changes since the start.

        Args:
            where: What the parts have done, such as "in a fit".
            memory: Where they can keep state instead.

        Raises:
            FlsuiteError: If an attribute has changed.
        """
        for part, before in self._before:
            after = _attributes(part)
            for name in after.keys() | before.keys():
                if name not in before or name not in after or _differ(before[name], after[name]):
                    raise FlsuiteError(
                        f"{type(part).__name__} has changed its {name} {where}: all clients share "
                        f"it, and a resumed run begins without it; keep state in {memory}"
                    )


def _attributes(part: Part) -> dict[str, Any]:
    """Return what a part's attributes hold, by name."""
    values: dict[str, Any] = {}
    for kind in reversed(type(part).__mro__):
        if not kind.__module__.startswith("flsuite.") and kind is not object:
            values |= {name: value for name, value in vars(kind).items() if _is_data(name, value)}
            slots = (name for name, member in vars(kind).items() if ismemberdescriptor(member))
            values |= {name: getattr(part, name) for name in slots if hasattr(part, name)}
    values |= _without_caches(part, getattr(part, "__dict__", {}))
    return {name: _content(value) for name, value in values.items()}


def _is_data(name: str, value: Any) -> bool:
    """Return whether an attribute of a class holds data, not a function or a property."""
    own = name.startswith(("__", "_abc_"))
    return not (own or isroutine(value) or hasattr(type(value), "__get__"))


def _without_caches(owner: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of an object without the ones that follow from the others.

    These are cached properties, and the training mode of a module, which its user sets.
    """
    skipped = {"training"} if isinstance(owner, nn.Module) else set()
    return {
        name: value
        for name, value in values.items()
        if name not in skipped and not _is_cache(getattr_static(type(owner), name, None))
    }


def _is_cache(of_the_class: Any) -> bool:
    """Return whether a class computes an attribute when it is first read, by a descriptor."""
    kind = type(of_the_class)
    is_function = isinstance(of_the_class, (FunctionType, staticmethod, classmethod))
    # One that is assigned to, as for validation, holds data.
    return hasattr(kind, "__get__") and not hasattr(kind, "__set__") and not is_function


def _differ(before: Any, after: Any) -> bool:
    """Return whether contents differ. Only bytes can be compared, for all kinds of values."""
    return after is not before and not (isinstance(after, bytes) and after == before)


def _content(value: Any) -> Any:
    """Return the bytes of a value, or the value itself if it has none."""
    content = io.BytesIO()
    try:
        _Pickler(content).dump(value)
    except Exception:  # some objects raise errors of their own
        return value
    return content.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles objects without their caches. An object that cannot be pickled counts as itself."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):  # its bytes differ from call to call
            drawn = torch.randint(2**62, (2,), generator=value.clone_state(), device=value.device)
            return tuple, (drawn.tolist(),)
        if isinstance(value, FunctionType) and "<" in value.__qualname__:  # has no name to find
            return int, (id(value),)
        if isinstance(value, type) or isroutine(value) or type(value) in copyreg.dispatch_table:
            return NotImplemented
        try:
            reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except TypeError:  # such as a lock
            return int, (id(value),)
        if not isinstance(reduced, tuple) or len(reduced) < 3:
            return reduced
        # With slots, the state has two parts.
        state = reduced[2]
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        kept = [_without_caches(value, p) or None if isinstance(p, dict) else p for p in parts]
        return *reduced[:2], tuple(kept) if len(kept) > 1 else kept[0], *reduced[3:]
