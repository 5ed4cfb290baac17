"""Arguments as plain values, and whether they have changed since another moment."""

import functools
import hashlib
import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from flsuite.common.arguments import arguments


class PlainArguments:
    """A base class that converts NumPy scalars to Python numbers when attributes are set.

    A NumPy integer is not an ``int`` to ``isinstance``, YAML or ``weights_only`` loading.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, plain(value))


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number, including inside a list or a tuple."""
    # np.float64 and np.str_ are subclasses of float and str, but YAML checks the exact type.
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple) and any(isinstance(item, np.generic) for item in value):
        return type(value)(map(plain, value))
    return value


def snapshot(value: Any) -> Any:
    """Return data that equals a later snapshot if and only if the value is unchanged.

    Objects are compared by type and arguments, arrays by content, and objects without arguments by
    identity.
    """
    if value is None or isinstance(value, (str, bytes, int, float, type)):
        return value
    if isinstance(value, Mapping):
        return type(value), {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [snapshot(item) for item in value]
    # A hash, because a copy of a large array would be kept in memory until the next snapshot.
    if isinstance(value, (np.ndarray, Tensor)):
        return type(value), hashlib.sha256(pickle.dumps(value)).digest()
    if isinstance(value, functools.partial):
        return snapshot((value.func, value.args, value.keywords))
    # Functions have no stored arguments, unlike a partial object, above.
    values = {} if inspect.isroutine(value) else arguments(value, inherited=True)
    return (type(value), snapshot(values)) if values else _Identity(value)


class _Identity:
    """A value that equals only itself.

    Holding the value keeps its identity from being reused.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]
