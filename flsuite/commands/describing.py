"""Classes and their arguments in plain words, for people who write configs."""

import collections.abc
import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from jsonargparse._parameter_resolvers import ParamData, get_signature_parameters
from jsonargparse._typehints import get_subclass_types

from flsuite.commands.known import LIBRARIES, Argument, Class
from flsuite.common.errors import path_of


class Option(NamedTuple):
    """One of the kinds of values that an argument takes.

    Attributes:
        words: What messages call it.
        short: What the help calls it. Empty for ``None``.
    """

    words: str
    short: str


_KINDS: dict[Any, Option] = {
    NoneType: Option("null", ""),
    bool: Option("true or false", "true|false"),
    int: Option("a whole number", "N"),
    float: Option("a number", "X"),
    complex: Option("a number", "X"),
    str: Option("text", "TEXT"),
    os.PathLike: Option("a path", "PATH"),
    Path: Option("a path", "PATH"),
    dict: Option("a mapping", "KEYS"),
    Any: Option("any value", ""),
    inspect.Parameter.empty: Option("any value", ""),
}
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "text": "texts"}
_LONGEST_KIND = 48
_PATHS = ("ckpt_path", "run_dir")  # whose type is text
_ROLE = re.compile(r":\w+:`~?([^`<]*?)(?:\s*<[^>]*>)?`")
_LINK = re.compile(r"`([^`<]*?)\s*<[^>]*>`_+")


def in_words(hint: Any) -> str:
    """Describe a type in words, such as "a whole number (at least 1) or null"."""
    words = dict.fromkeys(option.words for option in options_of(hint))
    has_number = any(word.startswith("a number") for word in words)
    drop = {"null"} | ({"a whole number"} if has_number else set())
    last = ["null"] if "null" in words else []
    *most, end = [word for word in words if word not in drop] + last
    return f"{', '.join(most)} or {end}" if most else end


def options_of(hint: Any) -> list[Option]:
    """Return one option per alternative of a type, and per choice of a ``Literal``."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [option for kind in inner for option in options_of(kind)]
    if origin is Annotated:
        limits = ", ".join(map(repr, inner[1:]))
        shorts = dict.fromkeys(option.short for option in options_of(inner[0]) if option.short)
        return [Option(f"{in_words(inner[0])} ({limits})", "|".join(shorts))]
    if origin is Literal:
        return [_KINDS[NoneType] if v is None else Option(str(v), str(v)) for v in inner]
    short = "CLASS" if get_subclass_types(hint, True, callable_return=True) else ""
    if origin is collections.abc.Callable:
        made = inner[-1] if inner else Any
        words = f"a class of {made.__name__}" if _is_class(made) else "a function"
        return [Option(words, short or "VALUE")]
    if hint in _LISTS or origin in _LISTS:
        item = next((kind for kind in inner if kind is not Ellipsis), Any)
        plural = _PLURALS.get(in_words(item)) or (item.__name__ if _is_class(item) else "")
        return [Option(f"a list of {plural}" if plural else "a list", short or "LIST")]
    if issubclass(origin or object, collections.abc.Mapping):
        return [_KINDS[dict]]
    kind = origin or hint
    name = kind.__name__ if inspect.isclass(kind) else "another value"
    return [_KINDS.get(kind) or Option(name, short or "VALUE")]


def _is_class(kind: Any) -> bool:
    return inspect.isclass(kind) and kind is not Any  # Any is a class from Python 3.11 on


@cache
def parameters_of(obj: Callable | type, method: str | None = None) -> dict[str, ParamData]:
    """Return the arguments that the parser takes for a class or one of its methods, by name."""
    return {parameter.name: parameter for parameter in get_signature_parameters(obj, method)}


def imported(path: str) -> Class | None:
    """Import a class and describe it. Return ``None`` if that fails, which the parser explains."""
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(import_module(module), name, None)
    except Exception:  # from a user's own module
        return None
    return described(cls) if inspect.isclass(cls) else None


def described(cls: type) -> Class:
    """Return what the help and the messages say of a class."""
    arguments: dict[str, Argument] = {}
    for name, own in parameters_of(cls).items():
        # A class need not repeat what its bases say of an argument.
        above = (parameters_of(base).get(name) for base in cls.__mro__[:-1])
        doc = next((one.doc for one in above if one and one.doc), "")
        arguments[name] = argument(replace(own, doc=doc))
    bases = [path_of(base) for base in cls.__mro__]
    return Class(path_of(cls), first_sentence(_own_doc(cls)), arguments, bases)


def argument(parameter: ParamData) -> Argument:
    """Return what the help and the messages say of an argument."""
    options = options_of(parameter.annotation)
    shorts = dict.fromkeys(option.short for option in options if option.short)
    kind = "PATH" if parameter.name in _PATHS else "|".join(shorts)
    classes = get_subclass_types(parameter.annotation, True, callable_return=True) or ()
    bases = [base for base in dict.fromkeys(classes) if is_known(base)]
    # Only the subclasses of known classes are all known.
    is_closed = shorts.keys() <= {"CLASS", "true|false"} and {*bases} == {*classes}
    return Argument(
        kind if len(kind) <= _LONGEST_KIND else "VALUE",
        _text_of(parameter),
        [path_of(base) for base in bases],
        not is_closed,
        parameter.default is inspect.Parameter.empty,
        _bounds_of(parameter.annotation),
    )


def _bounds_of(hint: Any) -> dict[str, float]:
    """Return the finite bounds of a number, or nothing if a type has several ranges."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [get_args(one) if get_origin(one) is Annotated else (one,) for one in options]
    numbers = [ranges for kind, *ranges in kinds if kind in (int, float, int | float)]
    ranges = numbers[0] if len(numbers) == 1 else []
    return {
        name: bound
        for one in ranges
        for name, bound in getattr(one, "bounds", ())
        if math.isfinite(bound)
    }


def is_known(cls: type) -> bool:
    """Return whether a class is of a library whose classes have short names, and not a protocol."""
    is_protocol = getattr(cls, "_is_protocol", False)  # any class with its methods fits
    return f"{cls.__module__}.".startswith(LIBRARIES) and not is_protocol


def _text_of(parameter: ParamData) -> str:
    text, _, default = (parameter.doc or "").partition("Default:")
    text = re.sub(r"\s*\(default: [^)]*\)", "", text)
    given = parameter.default
    is_plain = type(given).__module__ == "builtins" and not callable(given)
    if isinstance(given, dict) and "class_path" in given:
        own = ", ".join(f"{name}={value}" for name, value in given.get("init_args", {}).items())
        default = f"{given['class_path'].rpartition('.')[2]}({own})."
    elif is_plain and given is not None:
        default = f"{str(given).lower() if isinstance(given, bool) else given}."
    described = first_sentence(text)
    described += "." if described and described[-1] not in ".!?" else ""
    default = first_sentence(default)
    return f"{described} Default: {default}" if default not in ("", "None.") else described


def _own_doc(cls: type) -> str:
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return "" if doc.startswith(f"{cls.__name__}(") else doc  # written by dataclass


def first_sentence(text: str) -> str:
    """Return the beginning of a text without markup, up to a period that ends a sentence."""
    paragraph = _ROLE.sub(lambda role: role[1].rpartition(".")[2], text.partition("\n\n")[0])
    paragraph = " ".join(_LINK.sub(r"\1", paragraph).replace("`", "").split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`'])", paragraph)[0]
