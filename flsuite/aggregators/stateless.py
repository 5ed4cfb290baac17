"""A check that the parts of an algorithm keep no state in their attributes."""

import pickle
from functools import cached_property
from inspect import isroutine
from typing import Any

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.part import Part
from flsuite.errors import FlsuiteError


class Stateless:
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
    """Return what a part's attributes hold, by name.

    Cached properties are left out, because they follow from the others.
    """
    values: dict[str, Any] = {}
    for kind in reversed(type(part).__mro__):
        if not kind.__module__.startswith("flsuite.") and kind is not object:
            values |= {name: value for name, value in vars(kind).items() if _is_data(name, value)}
    values |= getattr(part, "__dict__", {})
    kind = type(part)
    return {
        name: _content(value)
        for name, value in values.items()
        if not isinstance(getattr(kind, name, None), cached_property)
    }


def _is_data(name: str, value: Any) -> bool:
    """Return whether an attribute of a class holds data, not a function or a property."""
    own = name.startswith(("__", "_abc_"))
    return not (own or isroutine(value) or hasattr(type(value), "__get__"))


def _differ(before: Any, after: Any) -> bool:
    """Return whether contents differ. Only bytes can be compared, for all kinds of values."""
    return after is not before and not (isinstance(after, bytes) and after == before)


def _content(value: Any) -> Any:
    """Return what changes with a value: its bytes, or itself if it has none."""
    try:
        return pickle.dumps(value)
    except Exception:  # some objects raise errors of their own
        return value
