"""Arithmetic on state dicts.

A :data:`State` maps names to tensors, as ``module.state_dict()`` gives them. Functions here never change their arguments
unless their name ends in an underscore, and never return tensors that alias them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "StateLayout",
    "RunningMean",
    "State",
    "add",
    "clone",
    "difference",
    "load_",
    "matches",
    "mismatch",
    "nbytes",
    "non_finite",
    "split",
]

State = dict[str, Tensor]


@dataclass(frozen=True)
class StateLayout:
    """What an aggregator may know of a model: the names of what travels, and which of them are parameters.

    Attributes:
        parameters: Trainable entries, in the model's order; the rest of the state are buffers.
        clients: How many clients there are, whether they take part or not.
        groups: The model's own groups of parameters that an aggregator may treat apart, by name.
    """

    parameters: tuple[str, ...]
    clients: int
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether an entry's name starts with one of the patterns; ``*``, ``?`` and ``[...]`` are wildcards."""
    return any(fnmatchcase(name, pattern + "*") for pattern in patterns)


def split(state: Mapping[str, Tensor], private: Sequence[str]) -> tuple[State, State]:
    """The entries that travel and those that stay, aliasing ``state``'s tensors: clone what must outlive it."""
    stays = {name for name in state if matches(name, private)}
    return {k: v for k, v in state.items() if k not in stays}, {
        k: v for k, v in state.items() if k in stays
    }


def clone(state: Mapping[str, Tensor]) -> State:
    """A snapshot on the CPU. ``state_dict()`` aliases live tensors, so whatever outlives the next step must be cloned."""
    return {k: v.detach().to("cpu", copy=True) for k, v in state.items()}


def load_(resident: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into the tensors of ``resident`` in place, keeping their device and memory format.

    Raises:
        KeyError: If ``source`` has an entry that ``resident`` lacks.
    """
    with torch.no_grad():
        for name, value in source.items():
            resident[name].copy_(value)


def difference(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Iterable[str] | None = None
) -> State:
    """``a - b`` over ``names`` (default: all of ``a``)."""
    return {k: a[k] - b[k] for k in (a if names is None else names)}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> State:
    """``a + scale * b`` over the entries of ``b``; the rest of ``a`` is copied."""
    return {k: torch.add(v, b[k], alpha=scale) if k in b else v.clone() for k, v in a.items()}


def nbytes(tree: Any) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples; other numbers count eight."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(nbytes(v) for v in tree.values())
    if isinstance(tree, (list, tuple)):
        return sum(nbytes(v) for v in tree)
    return 8 if isinstance(tree, (int, float)) else 0


def non_finite(tree: Any, name: str = "") -> str | None:
    """The name of the first entry of nested data that holds a NaN or an infinity, or ``None``."""
    if isinstance(tree, Tensor):
        bad = tree.is_floating_point() and not bool(torch.isfinite(tree).all())
        return (name or "value") if bad else None
    if isinstance(tree, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = iter(enumerate(tree))
    else:
        return (name or "value") if isinstance(tree, float) and tree - tree != 0.0 else None
    found = (non_finite(value, f"{name}.{key}" if name else str(key)) for key, value in items)
    return next((f for f in found if f is not None), None)


def mismatch(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """How ``state`` differs from ``reference`` in keys, shapes or dtypes, in words; ``None`` if it does not."""
    if missing := reference.keys() - state.keys():
        return f"lacks {', '.join(sorted(missing)[:3])}"
    if extra := state.keys() - reference.keys():
        return f"has unknown entries {', '.join(sorted(extra)[:3])}"
    for name, value in reference.items():
        got = state[name]
        if got.shape != value.shape:
            return f"{name} has shape {tuple(got.shape)} where {tuple(value.shape)} is expected"
        if got.dtype != value.dtype:
            return f"{name} has dtype {got.dtype} where {value.dtype} is expected"
    return None


class RunningMean:
    """Weighted mean of states that arrive one at a time, in float64, so that it never holds more than one of them.

    Integer entries (``num_batches_tracked`` and other counters) take their maximum: a mean of counters is no counter.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        self.weight += weight
        for name, value in state.items():
            floating = value.is_floating_point()
            if name not in self._sums:
                self._dtypes[name] = value.dtype
                self._sums[name] = (
                    torch.zeros_like(value, dtype=torch.float64) if floating else value.clone()
                )
            if floating:
                self._sums[name].add_(value, alpha=weight)
            else:
                torch.maximum(self._sums[name], value, out=self._sums[name])

    def mean(self) -> State:
        """The mean so far, in the dtypes that came in.

        Raises:
            ZeroDivisionError: If nothing with a weight has been added.
        """
        if self.weight <= 0:
            raise ZeroDivisionError("no weight to average over")
        return {
            name: (total / self.weight if total.dtype == torch.float64 else total.clone()).to(
                self._dtypes[name]
            )
            for name, total in self._sums.items()
        }
