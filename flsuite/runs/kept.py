"""Tensors of a run's kept checkpoints, each stored once.

A kept checkpoint has a reference in place of a tensor that an earlier one holds, bit for bit. It
names that file, the keys that lead to the tensor, and a digest of its bits.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.files import load_tensors
from flsuite.common.state import raw_bytes

_SMALLEST = 4096  # bytes; a reference to a smaller tensor would save next to nothing
_FILE, _KEYS, _BITS = "shared_with", "keys", "sha256"

Keys = tuple[Any, ...]


class KeptTensors:
    """The places of the tensors in the kept checkpoints of a run."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, Keys]] = {}

    def shared(self, content: Any, name: str) -> Any:
        """Return a checkpoint's content with references, and record the tensors that are new.

        Args:
            content: The content. It is not changed.
            name: The name that the file will have.

        Returns:
            The content itself if no earlier checkpoint holds any of its tensors.
        """
        is_shared = False

        def replace(leaf: Any, keys: Keys) -> Any:
            nonlocal is_shared
            if not _is_large(leaf):
                return leaf
            bits = _digest(leaf)
            file, place = self._places.setdefault(bits, (name, keys))
            if file == name:
                return leaf
            is_shared = True
            return {_FILE: file, _KEYS: list(place), _BITS: bits}

        replaced = _replaced(content, replace)
        return replaced if is_shared else content


def with_shared(content: Any, path: Path) -> Any:
    """Return a checkpoint's content with tensors in place of references.

    Args:
        content: The content, as it was read.
        path: The file that it was read from. The other checkpoints are in its folder.

    Raises:
        FlsuiteError: If a checkpoint that holds a tensor is missing, damaged or another one.
    """

    @cache
    def read(name: str) -> Any:
        remedy = f"{path.name} shares tensors with it: restore it, or use another checkpoint"
        return load_tensors(path.parent / name, remedy)["federation"]

    def replace(leaf: Any, keys: Keys) -> Any:
        if not _is_reference(leaf):
            return leaf
        try:
            held = read(leaf[_FILE])
            for key in leaf[_KEYS]:
                held = held[key]
        except (KeyError, IndexError, TypeError):
            held = None
        if not isinstance(held, Tensor) or _digest(held) != leaf[_BITS]:
            raise FlsuiteError(
                f"{path} shares {_name(keys)} with {leaf[_FILE]}, which does not hold it; restore "
                "both files, or use another checkpoint"
            )
        return held.clone()  # entries with equal bits may be changed in place, each for itself

    return _replaced(content, replace)


def _replaced(tree: Any, replace: Callable[[Any, Keys], Any], keys: Keys = ()) -> Any:
    """Return nested data with each leaf replaced. References are leaves."""
    if isinstance(tree, Mapping) and not _is_reference(tree):
        return {key: _replaced(value, replace, (*keys, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(v, replace, (*keys, i)) for i, v in enumerate(tree))
    return replace(tree, keys)


def _is_reference(tree: Any) -> bool:
    return isinstance(tree, Mapping) and tree.keys() == {_FILE, _KEYS, _BITS}


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.nbytes >= _SMALLEST


def _digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _name(keys: Keys) -> str:
    return ".".join(map(str, keys))
