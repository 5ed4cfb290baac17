"""Type hints in plain words, for people who write configs."""

import collections.abc
import inspect
import os
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_WORDS: dict[Any, str] = {
    NoneType: "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    complex: "a number",
    str: "text",
    os.PathLike: "a path",
    Path: "a path",
    dict: "a mapping",
    Any: "any value",
}
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "text": "texts"}


def in_words(hint: Any) -> str:
    """Describe a type in words, such as "a whole number (at least 1) or null"."""
    words = dict.fromkeys(options_of(hint))
    has_number = any(word.startswith("a number") for word in words)
    drop = {"null"} | ({"a whole number"} if has_number else set())
    last = ["null"] if "null" in words else []
    *most, end = [word for word in words if word not in drop] + last
    return f"{', '.join(most)} or {end}" if most else end


def options_of(hint: Any) -> list[str]:
    """Return one description per alternative of a type, and the choices of a ``Literal``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [word for kind in inner for word in options_of(kind)]
    if origin is Annotated:
        return [f"{in_words(inner[0])} ({', '.join(map(repr, inner[1:]))})"]
    if origin is Literal:
        return ["null" if value is None else str(value) for value in inner]
    if origin is collections.abc.Callable:
        made = inner[-1] if inner else Any
        return [f"a class of {made.__name__}" if _is_class(made) else "a function"]
    if hint in _LISTS or origin in _LISTS:
        item = next((kind for kind in inner if kind is not Ellipsis), Any)
        plural = _PLURALS.get(in_words(item)) or (item.__name__ if _is_class(item) else "")
        return [f"a list of {plural}" if plural else "a list"]
    if issubclass(origin or object, collections.abc.Mapping):
        return ["a mapping"]
    kind = origin or hint
    return [_WORDS.get(kind) or (kind.__name__ if inspect.isclass(kind) else "another value")]


def _is_class(kind: Any) -> bool:
    return inspect.isclass(kind) and kind is not Any  # Any is a class from Python 3.11 on
