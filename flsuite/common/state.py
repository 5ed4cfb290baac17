"""Arithmetic on state dicts.

A :data:`State` maps names to tensors, as ``module.state_dict()`` does. Functions here never change
their arguments, unless their name ends in an underscore. They never return tensors that alias their
arguments, unless documented.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, path_of

State = dict[str, Tensor]
Tree = dict[str, Any]
"""Nested dicts of tensors and numbers."""

_SMALL = 2**14
"""Numbers of a tensor that a CPU copies faster than it calls an operation on them."""


@dataclass(frozen=True)
class Layer:
    """A shared Linear or Conv2d layer.

    Attributes:
        name: Prefix of its entries in the state dict, such as ``network.0``.
        kind: ``linear``, with a weight ``(out, in)``, or ``conv2d``, with a weight
            ``(out, in, height, width)``.
        bias: Whether it has a bias ``(out,)``.
        positions: Columns of the weight per channel of the previous layer: ``height * width`` where
            a linear layer reads a flattened image, else 1. Columns are grouped by channel.
    """

    name: str
    kind: Literal["linear", "conv2d"]
    bias: bool
    positions: int = 1

    @property
    def weight_name(self) -> str:
        """Return the name of the weight in the state dict."""
        return f"{self.name}.weight"

    @property
    def bias_name(self) -> str:
        """Return the name of the bias in the state dict. The layer may have none."""
        return f"{self.name}.bias"


@dataclass(frozen=True)
class StateLayout:
    """The part of a model's structure that is visible to an aggregator.

    Attributes:
        parameters: Names of the shared trainable entries, in the model's order. The other shared
            entries are buffers.
        clients: Number of registered clients, with those that never train.
        groups: Parameter names of each group that the model declares.
        samples: Training samples of all clients.
        layers: The Linear and Conv2d layers that are shared as a whole, in the model's order.
        outside_layers: Modules with shared parameters outside such layers: each name with its type,
            such as ``BatchNorm2d``.
        chain: The same layers if each feeds the next one through pools, ReLU, dropout and Flatten
            only. It is empty for any other model, and unless the rule needs one.
        no_chain: The reason if there is no chain.
        buffers: Names of the shared entries that are not parameters.
        reset: Names of the shared buffers that every fit starts from their initial values.
    """

    parameters: tuple[str, ...]
    clients: int
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    samples: int = 0
    layers: tuple[Layer, ...] = ()
    outside_layers: Mapping[str, str] = field(default_factory=dict)
    chain: tuple[Layer, ...] = ()
    no_chain: str = "its layers are not known"
    buffers: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name starts with one of the patterns, which may contain wildcards."""
    return any(fnmatchcase(name, pattern + "*") for pattern in patterns)


def clone(state: Mapping[str, Tensor], device: str | None = "cpu") -> State:
    """Return a snapshot. ``state_dict()`` itself aliases tensors that keep changing.

    Args:
        state: A state.
        device: The device of the snapshot. With ``None``, each tensor stays on its device.
    """
    # copy=True, because .to() returns the tensor itself if it is already there.
    return {
        name: value.detach().to(device or value.device, copy=True) for name, value in state.items()
    }


def moved(tree: Mapping[str, Any], device: torch.device | str) -> Tree:
    """Return nested data with its tensors on a device. Those that are there stay the same."""
    return _with_tensors(tree, lambda tensor: tensor.to(device))


def load_(resident: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into the tensors of ``resident``, keeping their device and memory format.

    Raises:
        KeyError: If ``source`` has an entry that ``resident`` lacks.
    """
    with torch.no_grad():
        for name, value in source.items():
            # In place, because the optimizer and the model hold references to these tensors.
            resident[name].copy_(value)


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> State:
    """Return ``a - b`` over the entries of ``a``."""
    return {name: value - b[name] for name, value in a.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> State:
    """Return ``a + scale * b`` over the entries of ``b``.

    The other entries of ``a`` are copied.
    """
    return {
        name: torch.add(value, b[name], alpha=scale) if name in b else value.clone()
        for name, value in a.items()
    }


def nbytes(tree: Any) -> int:
    """Return the total bytes of the tensors in nested dicts, lists and tuples.

    A number counts as eight bytes.
    """
    return sum(
        leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 8
        for _, leaf in leaves(tree)
        if isinstance(leaf, (Tensor, int, float))
    )


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, lists and tuples with their names, such as ``a.0``."""
    # Most are tensors, and the Mapping check is slower.
    if isinstance(tree, Tensor) or not isinstance(tree, (Mapping, list, tuple)):
        yield name, tree
    else:
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, _join(name, key))


def non_finite(tree: Any, name: str = "") -> str | None:
    """Return the name of the first entry of nested data with NaN or infinity, or ``None``."""
    return next((at or "value" for at, leaf in leaves(tree, name) if not _is_finite(leaf)), None)


def _is_finite(leaf: Any) -> bool:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        # NaN and infinity propagate through a sum. It is several times faster than checking every
        # number, which is left for large numbers with an infinite sum.
        total = float(leaf.sum(dtype=torch.float32))
        return math.isfinite(total) or bool(torch.isfinite(leaf).all())
    return not isinstance(leaf, float) or math.isfinite(leaf)


def mismatch(got: Any, expected: Any, name: str = "") -> str | None:
    """Return how nested data differs from a template, or ``None``.

    Keys, shapes, dtypes and layouts are compared.

    Args:
        got: A tensor, a number, or nested dicts of them.
        expected: The template. The values of its tensors are ignored.
        name: The name of ``got`` in the message.
    """
    if isinstance(expected, Mapping):
        faults = (mismatch(got[key], value, _join(name, key)) for key, value in expected.items())
        return mismatch_of_keys(got, expected, name) or next(filter(None, faults), None)

    what = name or "value"
    if not isinstance(expected, Tensor):
        is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
        return None if is_number else f"{what} is a {type(got).__name__}; a number is expected"
    if not isinstance(got, Tensor):
        return f"{what} is a {type(got).__name__}; a tensor is expected"
    if got.shape != expected.shape:
        return f"{what} has shape {tuple(got.shape)}; {tuple(expected.shape)} is expected"
    if got.dtype != expected.dtype:
        return f"{what} has dtype {got.dtype}; {expected.dtype} is expected"
    if got.layout != expected.layout:
        # Most functions that read a message support dense tensors only.
        return f"{what} has layout {got.layout}; {expected.layout} is expected"
    return None


def mismatch_of_keys(got: Any, expected: Iterable[str], name: str = "") -> str | None:
    """Return how the keys of ``got`` differ from the expected ones, or ``None``."""
    prefix = f"{name} " if name else ""
    if not isinstance(got, Mapping):
        return f"{name or 'value'} is a {type(got).__name__}; a dict is expected"
    if missing := set(expected) - got.keys():
        return f"{prefix}lacks {', '.join(sorted(missing)[:3])}"
    if unknown := got.keys() - set(expected):
        return f"{prefix}has unknown entries {', '.join(sorted(map(str, unknown))[:3])}"
    return None


def plain(tree: Any, name: str) -> Any:
    """Return nested data with NumPy scalars as Python numbers, checked to be loadable.

    Checkpoints are loaded with ``weights_only=True``, which accepts only tensors, numbers, text and
    Python containers.

    Raises:
        FlsuiteError: If it contains anything else. The message names the place.
    """
    if isinstance(tree, np.generic):
        return plain(tree.item(), name)
    # Check the exact type: loading a subclass, such as an enum, would require its class.
    if isinstance(tree, Tensor):
        return tree.detach()  # a tensor with a graph cannot be copied
    if tree is None or type(tree) in (bool, int, float, str, bytes):
        return tree

    if isinstance(tree, Mapping):
        keys = {key: plain(key, f"a key of {name}") for key in tree}
        return {keys[key]: plain(value, _join(name, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple, set):
        return type(tree)(plain(value, _join(name, i)) for i, value in enumerate(tree))

    raise FlsuiteError(
        f"{name} is a {path_of(type(tree))}, which a checkpoint cannot hold; keep tensors, "
        "numbers, text, lists and dicts"
    )


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes, for a digest. NumPy has no bfloat16."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return values.numpy().data


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


class Sums:
    """Sums of nested data that arrives one client at a time.

    Floating-point tensors and numbers are summed in float64. Integer tensors, such as
    ``num_batches_tracked``, take their maximum, because summed counters are meaningless. At most
    one client's data is held at a time. A sum stays on the device of its first tensor.

    Attributes:
        values: The sums, nested like the data.
    """

    def __init__(self) -> None:
        self.values: Tree = {}

    def add(self, tree: Tree, scale: float = 1.0) -> None:
        """Add one client's data, or the values of other sums, multiplied by ``scale``."""
        _add_(self.values, tree, scale)

    def add_all(self, trees: Sequence[Mapping[str, Any]]) -> None:
        """Add the data of several clients, which fits in memory at once.

        Each entry of a stack of clients is added in one operation.
        """
        if trees:
            _add_all_(self.values, trees)

    @property
    def is_finite(self) -> bool:
        """Return whether every added number is finite."""
        # NaN and infinity propagate through a sum, and summed float32 cannot overflow float64.
        return non_finite(self.values) is None


def _add_(sums: Tree, tree: Mapping[str, Any], scale: float) -> None:
    for name, value in tree.items():
        if not _is_leaf(value):
            _add_(sums.setdefault(name, {}), value, scale)
        elif not isinstance(value, Tensor):
            sums[name] = sums.get(name, 0.0) + scale * value
        elif not value.is_floating_point():
            greatest = sums.get(name, value)
            sums[name] = torch.maximum(greatest, value.to(greatest.device))
        elif name in sums:
            sums[name].add_(value.to(sums[name].device), alpha=scale)
        else:
            # Start from zero, so the first client's numbers are rounded like the others'.
            sums[name] = torch.zeros_like(value, dtype=torch.float64).add_(value, alpha=scale)


def _add_all_(sums: Tree, trees: Sequence[Mapping[str, Any]]) -> None:
    """Add nested data of several clients. Rounding differs from adding one after another."""
    trees, factors = zip(*map(_factored, trees), strict=True)
    names = trees[0].keys()
    if any(tree.keys() != names for tree in trees):
        for tree, factor in zip(trees, factors, strict=True):
            _add_(sums, scaled(tree, factor), 1.0)
        return
    weights: Tensor | None = None
    for name in names:
        values = [tree[name] for tree in trees]
        if not _is_leaf(values[0]):
            _add_all_(sums.setdefault(name, {}), list(map(scaled, values, factors)))
        elif _is_faster_together(values):
            together = torch.stack(values).double()
            if weights is None or weights.device != together.device:
                weights = torch.tensor(factors, dtype=torch.float64, device=together.device)
            total = together.mul_(weights.view(-1, *[1] * values[0].ndim)).sum(0)
            _add_(sums, {name: total}, 1.0)
        else:
            for value, factor in zip(values, factors, strict=True):
                _add_(sums, scaled({name: value}, factor), 1.0)


def _factored(tree: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
    """Return nested data, and the number that each of its leaves is to be multiplied by."""
    factor = 1.0
    while isinstance(tree, _Scaled):
        factor, tree = factor * tree.factor, tree.tree
    return tree, factor


def _is_faster_together(values: Sequence[Any]) -> bool:
    """Return whether tensors are summed faster if they are stacked before.

    On a CPU, copies of large ones cost more than calls.
    """
    first = values[0]
    return (
        isinstance(first, Tensor)
        and first.is_floating_point()
        and (first.device.type != "cpu" or first.numel() <= _SMALL)
        and all(isinstance(value, Tensor) and value.shape == first.shape for value in values)
    )


def _is_counter(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point()


def _is_leaf(value: Any) -> bool:
    # Most are tensors, and the Mapping check is slower.
    return isinstance(value, Tensor) or not isinstance(value, Mapping)


def mapped(tree: Mapping[str, Any], function: Callable[[Any], Any]) -> Tree:
    """Return nested data with a function applied to each tensor and number."""
    return {
        name: function(value) if _is_leaf(value) else mapped(value, function)
        for name, value in tree.items()
    }


def template_of(tree: Mapping[str, Any]) -> Tree:
    """Return nested data with meta tensors: shapes and dtypes without values."""

    return _with_tensors(tree, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))


def _with_tensors(tree: Mapping[str, Any], function: Callable[[Tensor], Tensor]) -> Tree:
    """Return nested data with a function applied to each tensor. Numbers stay."""
    return mapped(tree, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


class _Scaled(Mapping[str, Any]):
    """Nested data times a number, computed leaf by leaf when it is read."""

    def __init__(self, tree: Mapping[str, Any], factor: float) -> None:
        self.tree, self.factor = tree, factor

    def __getitem__(self, name: str) -> Any:
        value = self.tree[name]
        if not _is_leaf(value):
            return _Scaled(value, self.factor)
        if _is_counter(value):
            return value
        if not isinstance(value, Tensor):
            return value * self.factor
        # In place, to avoid another copy of a large model.
        return value.to(torch.float64, copy=True).mul_(self.factor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)


def scaled(tree: Mapping[str, Any], factor: float) -> Mapping[str, Any]:
    """Return nested data times a number, in float64. Integer tensors are returned unchanged.

    A leaf is computed when it is read, so the sum of a large model needs no second copy of it.
    """
    return _Scaled(tree, factor)


def divided(sums: Mapping[str, Any], by: float) -> Tree:
    """Return sums divided by a number. Integer tensors are copied.

    Raises:
        ZeroDivisionError: If the divisor is not above zero.
    """
    if by <= 0:
        raise ZeroDivisionError("no weight to average over")

    def quotient(leaf: Any) -> Any:
        return leaf.clone() if _is_counter(leaf) else leaf / by

    return mapped(sums, quotient)


def mean_of(states: Iterable[tuple[Mapping[str, Tensor], float]]) -> State:
    """Return the weighted mean of states that arrive one at a time, in float64.

    Integer entries take their maximum.

    Raises:
        ZeroDivisionError: If the total weight is zero.
    """
    sums, total = Sums(), 0.0
    for state, weight in states:
        sums.add(dict(state), weight)
        total += weight
    return divided(sums.values, total)


def wide(state: Mapping[str, Tensor]) -> State:
    """Return a copy with floating-point entries in float64."""
    return {
        name: value.to(torch.float64, copy=True) if value.is_floating_point() else value.clone()
        for name, value in state.items()
    }


def shuffled(state: State, names: Iterable[str], generator: torch.Generator) -> State:
    """Return a state whose named entries have their values in another order. Others are shared.

    Args:
        state: A state.
        names: The entries to shuffle. Names that are missing in the state are ignored.
        generator: Source of randomness.
    """
    new = dict(state)
    for name in (name for name in names if name in new):
        order = torch.randperm(state[name].numel(), generator=generator)
        new[name] = state[name].flatten()[order].view_as(state[name])
    return new


def cast(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> State:
    """Return the values of ``state`` in the dtypes and order of ``like``, for its entries only."""
    return {name: state[name].to(value.dtype, copy=True) for name, value in like.items()}


def flatten(state: State, names: Collection[str], dtype: torch.dtype) -> Tensor:
    """Return some entries of a state as one vector on the CPU."""
    flat = [state[name].detach().to("cpu", dtype).reshape(-1) for name in names]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=dtype)


def unflatten(vector: Tensor, like: State, names: Collection[str]) -> State:
    """Return a vector as entries in the shapes of a state. They are views of the vector."""
    pieces = vector.split([like[name].numel() for name in names])
    return {name: p.view(like[name].shape) for name, p in zip(names, pieces, strict=True)}


def flatten_tree(tree: Mapping[str, Any], name: str = "") -> State:
    """Return the leaves of nested data by path, with numbers as tensors."""
    flat: State = {}
    for key, value in tree.items():
        path = f"{name}/{key}" if name else str(key)
        if isinstance(value, Mapping):
            flat |= flatten_tree(value, path)
        else:
            flat[path] = value if isinstance(value, Tensor) else torch.tensor(float(value)).double()
    return flat


def nested_like(tree: Mapping[str, Any], flat: Mapping[str, Tensor], name: str = "") -> Tree:
    """Return flat leaves nested like ``tree``, without the leaves that are missing."""
    nested: Tree = {}
    for key, value in tree.items():
        path = f"{name}/{key}" if name else str(key)
        if isinstance(value, Mapping):
            nested[key] = nested_like(value, flat, path)
        elif path in flat:
            nested[key] = flat[path] if isinstance(value, Tensor) else float(flat[path])
    return nested
