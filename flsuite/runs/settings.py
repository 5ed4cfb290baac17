"""Objects as plain data: the inverse of instantiating a config.

It rests on one convention: whatever a config can name keeps each parameter of its ``__init__`` under the same name.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["class_name", "defaults", "describe", "differences", "init_args"]

_PLAIN = (str, int, float, bool, type(None))


def class_name(cls: type) -> str:
    """The shortest public path of a class: ``flsuite.models.Classifier`` rather than the file it is written in."""
    parts = cls.__module__.split(".")
    if parts[0] == "flsuite" and len(parts) > 2:
        parts = parts[:2]
    return ".".join([*parts, cls.__qualname__])


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The default of each parameter that has one. What is given as the default is no choice: a config writes all of them."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def init_args(obj: Any) -> dict[str, Any]:
    """The parameters that ``obj`` was made with, described; a base class's too, where ``**kwargs`` passes them on."""
    found: dict[str, Any] = {}
    for cls in type(obj).__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        for parameter in parameters:
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if named and parameter.name != "self" and hasattr(obj, parameter.name):
                found.setdefault(parameter.name, describe(getattr(obj, parameter.name)))
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return found


def describe(obj: Any) -> Any:
    """Plain data: numbers, strings, lists, dicts, and ``{class_path, init_args}`` for objects."""
    if isinstance(obj, _PLAIN):
        return obj
    if isinstance(obj, Path):
        return str(obj)
    if isinstance(obj, Mapping):
        return {str(k): describe(v) for k, v in obj.items()}
    if isinstance(obj, (list, tuple, set, frozenset)):
        return [describe(v) for v in obj]
    if isinstance(obj, functools.partial):
        # jsonargparse wraps the class in helpers of its own, as leading arguments
        target = next((a for a in obj.args if isinstance(a, type)), obj.func)
        usual = defaults(target)
        given = {k: describe(v) for k, v in obj.keywords.items() if v is not None and (k not in usual or v != usual[k])}
        return {"class_path": f"{target.__module__}.{target.__qualname__}", "init_args": given}
    if isinstance(obj, type):
        return f"{obj.__module__}.{obj.__qualname__}"
    if inspect.isroutine(obj):
        return _source(obj)
    return {"class_path": class_name(type(obj)), "init_args": init_args(obj)}


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two descriptions differ: path, our value, their value."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            name = path if key == "init_args" else f"{path}.{key}" if path else str(key)
            yield from differences(ours.get(key), theirs.get(key), name)
    elif ours != theirs:
        yield path.removesuffix(".class_path"), ours, theirs


@functools.cache
def _text(function: Any) -> str:
    """Read once: the file may change while the program runs."""
    try:
        return inspect.getsource(function).strip()
    except (OSError, TypeError):
        return f"{function.__module__}.{function.__qualname__}"


def _source(function: Any) -> str:
    """The source, and the values that it takes from where it was written: ``lambda p: SGD(p, lr=lr)`` says little without."""
    try:
        found = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        return _text(function)
    values = {k: v for k, v in {**found.nonlocals, **found.globals}.items() if isinstance(v, _PLAIN)}
    return _text(function) + (f" with {values}" if values else "")
