"""The constructor arguments of an object, as plain values that can be compared over time.

This relies on one convention: an object stores each parameter of its ``__init__`` under the same
name.
"""

import functools
import hashlib
import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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


def arguments(obj: Any) -> dict[str, Any]:
    """Return the current values of the ``__init__`` parameters, including base classes."""
    # A dict instead of a set, to preserve the order of the signatures.
    names = {name: None for cls in type(obj).__mro__ for name in _parameters(cls)}
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


def _parameters(cls: type) -> list[str]:
    """Return the names of the parameters of a class's own ``__init__``."""
    if "__init__" not in vars(cls):
        return []
    try:
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
    except (TypeError, ValueError):  # a class written in C may have no signature
        return []
    return [parameter.name for parameter in parameters if parameter.kind in _NAMED]


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
    values = {} if inspect.isroutine(value) else arguments(value)
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
