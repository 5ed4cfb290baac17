"""Arguments that check themselves: dataclasses whose annotations state each field's valid values.

jsonargparse reads the same annotations, so a config, the command line and Python reject the same
values.
"""

import contextlib
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from flsuite.common.errors import FlsuiteError, likeliest, path_of


class Range(NamedTuple):
    """The valid values of an argument.

    Attributes:
        text: Text that completes the sentence "must be ...".
        contains: Returns whether a value is valid. NaN is never valid.
        bounds: The bounds of a number, by their names in a JSON schema.
    """

    text: str
    contains: Callable[[Any], bool]
    bounds: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:  # as --help shows it
        return self.text


_BOUNDS: dict[str, Callable[[Any, float], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


def within(text: str, **bounds: float) -> Range:
    """Return the range of the numbers within bounds, such as ``minimum=0``."""
    tests = [(_BOUNDS[name], bound) for name, bound in bounds.items()]
    return Range(text, lambda x: all(test(x, bound) for test, bound in tests), (*bounds.items(),))


def at_least(lowest: float) -> Range:
    """Return the range of finite numbers >= ``lowest``."""
    return within(f"at least {lowest}", minimum=lowest, exclusiveMaximum=math.inf)


PositiveFloat = Annotated[float, within("positive", exclusiveMinimum=0, exclusiveMaximum=math.inf)]
NonNegativeFloat = Annotated[float, at_least(0)]
Fraction = Annotated[float, within("above 0 and at most 1", exclusiveMinimum=0, maximum=1)]
Share = Annotated[float, within("from 0 to 1", minimum=0, maximum=1)]
SmallProbability = Annotated[
    float, within("above 0 and below 1", exclusiveMinimum=0, exclusiveMaximum=1)
]
BelowOneOrNumber = Annotated[
    int | float,
    Range(
        "a share of at least 0.0 and below 1.0, or a whole number",
        lambda x: 0 <= x < 1 if isinstance(x, float) else x >= 0,
        (("minimum", 0),),
    ),
]
BelowOne = Annotated[float, within("in [0, 1)", minimum=0, exclusiveMaximum=1)]
Radius = Annotated[float, within("positive", exclusiveMinimum=0)]  # may be infinite
PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
Bits = Annotated[int, within("from 2 to 16", minimum=2, maximum=16)]
Seed = Annotated[int, within("from 0 to 2**63 - 1", minimum=0, maximum=2**63 - 1)]
# torch rejects absurd numbers.
Threads = Annotated[int, at_least(1), within("at most 4096", maximum=4096)]


_NUMBERS = {int: Integral, float: Real}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
    tuple: "a list",
    list: "a list",
    Sequence: "a list",
}


class Settings:
    """Base of a dataclass that checks its fields by their annotations on creation.

    A subclass with further checks, such as of two fields together, calls
    ``super().__post_init__()`` first.

    Attributes:
        owner: The name that messages use instead of the class name.

    Raises:
        FlsuiteError: If a field is invalid. The message names the class, the field and the value.
    """

    owner = ""

    def __post_init__(self) -> None:
        kind: Any = type(self)  # a dataclass
        hints = _hints(kind)
        _check(self, {field.name: hints[field.name] for field in fields(kind) if field.init})


def check_init(obj: Any, cls: type | None = None, names: Collection[str] | None = None) -> None:
    """Refuse an object with an ``__init__`` argument that the annotation does not allow.

    Like :class:`Settings`, but for a class that is not a dataclass.

    Args:
        obj: The object.
        cls: The class whose own ``__init__`` is checked. It excludes the arguments of subclasses,
            which may come from users. Default: the object's class and its bases.
        names: The arguments that are checked. Default: all that are attributes.
    """
    hints = _hints_of_init(type(obj).__mro__ if cls is None else (cls,))
    names = names or [name for name in hints if hasattr(obj, name)]
    _check(obj, {name: hints[name] for name in names})


def require(owner: str, hint: Any, **values: Any) -> None:
    """Refuse values that are not of a type with a range, such as ``PositiveInt | None``.

    Args:
        owner: The name that the message begins with.
        hint: The type. ``None`` as an option means that an argument may be left out.
        values: The values by the names of their arguments.
    """
    for name, value in values.items():
        if fault := _fault(value, hint):
            got = "null" if value is None else repr(value)  # as a config has it
            raise FlsuiteError(f"{owner}: {name} must be {fault}, got {got}")


def require_known(owner: type, names: Iterable[str], base: type) -> None:
    """Refuse arguments that neither a class nor its base has.

    Args:
        owner: The class. It passes arguments that it does not have on to the base.
        names: Names of the arguments.
        base: The base.

    Raises:
        FlsuiteError: If an argument is unknown. The message names the most similar one.
    """
    passed_on = inspect.signature(base).parameters
    known = {*inspect.signature(owner).parameters, *passed_on}
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in passed_on.values())
    for name in names:
        if name not in known and not is_open:
            near = likeliest(name, known)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise FlsuiteError(f"{owner.__name__}: there is no argument {name!r}{hint}")


_GIVEN = "_given_arguments"
_MISSING = object()
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FOLLOWS = ("flsuite.", "lightning.")  # their classes store what they are given


def create(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Create an object from a config, and keep the arguments of classes of the user as given.

    A run's settings need them, or runs that differ in them would look the same. An attribute of an
    argument's name may be missing or hold another thing, such as the layers made from their number.
    """
    given = {
        name: _without_aliases(value)
        for name, value in kwargs.items()
        if not _owner(cls, name).__module__.startswith(_FOLLOWS)
    }
    obj = cls(*args, **kwargs)
    if given and hasattr(obj, "__dict__"):
        vars(obj)[_GIVEN] = given
    return obj


def arguments(obj: Any, inherited: bool = False) -> dict[str, Any]:
    """Return the arguments of an object's ``__init__`` whose values the object still has.

    A value is kept by :func:`create`, in an attribute of the argument's name or with a leading
    underscore, or in Lightning's hyperparameters.

    Args:
        obj: The object.
        inherited: Include the arguments of all base classes. Default: of those that are reached
            through ``**kwargs``.
    """
    given = getattr(obj, "__dict__", {}).get(_GIVEN, {})
    names: dict[str, None] = {}
    for cls in type(obj).__mro__:
        parameters = _parameters(cls)
        names |= {p.name: None for p in parameters if p.kind in _NAMED}
        is_open = inherited or any(p.kind is p.VAR_KEYWORD for p in parameters)
        if "__init__" in vars(cls) and not is_open:
            break

    values = {name: given[name] if name in given else _stored(obj, name) for name in names}
    # Other given names are those that ``**kwargs`` took.
    return {name: v for name, v in (values | given).items() if v is not _MISSING}


def _stored(obj: Any, name: str) -> Any:
    for attribute in (name, f"_{name}"):
        value = getattr(obj, attribute, _MISSING)
        is_own_method = inspect.ismethod(value) and value.__self__ is obj
        if value is not _MISSING and not is_own_method:
            return value
    # Lightning's save_hyperparameters() stores them here.
    return (getattr(obj, "__dict__", {}).get("_hparams") or {}).get(name, _MISSING)


def _owner(cls: type, name: str) -> type:
    """Return the class whose ``__init__`` has an argument of this name, or the class itself."""
    mro = getattr(cls, "__mro__", ())
    return next((c for c in mro if name in {p.name for p in _parameters(c)}), cls)


@cache
def _parameters(cls: type) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a class's own ``__init__``, without ``self``, if it has one."""
    try:
        return tuple(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
    except (KeyError, TypeError, ValueError):  # a class written in C may have no signature
        return ()


def _without_aliases(value: Any) -> Any:
    """Return a copy of lists and dictionaries, because a class may change what it is given."""
    if type(value) is list:
        return [_without_aliases(part) for part in value]
    if type(value) is dict:
        return {key: _without_aliases(part) for key, part in value.items()}
    return value


def _check(obj: Any, hints: Mapping[str, Any]) -> None:
    owner = getattr(obj, "owner", "") or type(obj).__name__
    for name, hint in hints.items():
        require(owner, hint, **{name: getattr(obj, name)})


@cache
def _hints_of_init(classes: tuple[type, ...]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for owner in reversed(classes):
        if init := vars(owner).get("__init__"):
            with contextlib.suppress(NameError, TypeError):  # a name defined in a user's module
                hints |= get_type_hints(init, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _fault(value: Any, hint: Any) -> str | None:
    """Return what a value must be, or ``None`` if it is valid."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        faults = [_fault(value, option) for option in get_args(hint)]
        # null means that an argument is left out. The other options say what it must be.
        named = [fault for fault in faults if fault not in (None, "null")]
        return None if None in faults else " or ".join(dict.fromkeys(named))
    if origin is Annotated:
        kind, *ranges = get_args(hint)
        return _fault(value, kind) or next(
            (r.text for r in ranges if isinstance(r, Range) and not r.contains(value)), None
        )
    if origin is Literal:
        choices = get_args(hint)
        return None if value in choices else f"one of {', '.join(map(str, choices))}"
    if origin is tuple and isinstance(value, (tuple, list)):
        kinds = get_args(hint)
        if kinds[-1:] == (...,):  # any number of values of one kind
            kinds = kinds[:1] * len(value)
        pairs = zip(value, kinds, strict=False)
        if fault := next(filter(None, (_fault(v, kind) for v, kind in pairs)), None):
            return fault
    return _fault_of_kind(value, origin or hint)


def _fault_of_kind(value: Any, kind: Any) -> str | None:
    if kind is Any:
        return None
    if kind is None or kind is type(None):
        return None if value is None else "null"
    if kind in (int, float):
        # bool is a subclass of int, but is never meant as a number. NumPy's numbers are Real.
        is_number = isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
        return None if is_number else _WORDS[kind]
    if isinstance(kind, type) and not isinstance(value, kind):
        # Arrays and tensors count as lists of values.
        is_indexed = hasattr(value, "__getitem__") and not isinstance(value, (str, Mapping))
        is_list = is_indexed and kind in (list, tuple, Sequence)
        return None if is_list else _WORDS.get(kind, f"a {path_of(kind)}")
    return None
