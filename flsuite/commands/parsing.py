"""A parser whose errors are one line."""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from flsuite.errors import FlsuiteError

__all__ = ["OneLineParser", "config_name", "plain_errors", "refuse_nulls"]

_NOISE = re.compile(
    r"(Does not validate|Subtypes:|Errors:|Given value|Got value|usage:"
    r"|Expected a <class 'NoneType'>|Expected a path but)"
)
_ABSTRACT = re.compile(r"Expected an instantiatable class, but (flsuite[\w.]*)\.(\w+) is abstract")
_OTHER_KIND = re.compile(r"Import path \S+ does not correspond to a subclass of")
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
# A nested parser has said where already.
_NESTED = re.compile(r"[\w.]+: (there is no |expected |set )")
_OPTION = re.compile(r"Given value: NestedArg\(key='([^']+)'")  # given as --KEY.OPTION
_KIND = re.compile(r"Expected a (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.+)\])(?:\. Got|$)")
_VALUE = re.compile(r"(?:Given|Got) value: (.*)")
_NO_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_OWN = {
    "LightningModule": ("flsuite.models", "ClientModel"),
    "LightningDataModule": ("flsuite.data", "FederatedDataModule"),
}
_KEY = re.compile(r'Parser key "([^"]+)":?')


class OneLineParser(LightningArgumentParser):
    """LightningCLI's parser, with each error as a :class:`FlsuiteError` of one line.

    A logger needs no ``save_dir``: its files go into the run's folder, which is known later.
    """

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        if not _needs_save_dir(class_type):
            return super().add_class_arguments(class_type, *args, **kwargs)
        kwargs["skip"] = {*(kwargs.get("skip") or ()), "save_dir"}
        added = super().add_class_arguments(class_type, *args, **kwargs)
        self.add_argument("--save_dir", type=str | Path, default="", help="Default: the run's.")
        return [*added, "save_dir"]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if found := re.search(r"unrecognized arguments: (\S+)", message):
            raise FlsuiteError(f"unknown key {found[1]}{self._nearest(found[1])}") from ex
        raise FlsuiteError(essence(message)) from ex

    def _nearest(self, option: str) -> str:
        known = [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        ]
        return _suggest(option.split("=")[0], known)


def _needs_save_dir(class_type: Any) -> bool:
    """Return whether a class is a logger that must be told where to write."""
    if not (inspect.isclass(class_type) and issubclass(class_type, Logger)):
        return False
    parameter = inspect.signature(class_type).parameters.get("save_dir")
    return parameter is not None and parameter.default is parameter.empty


def essence(message: str) -> str:
    """Return the useful part of an error message of jsonargparse.

    jsonargparse explains each of its attempts to read a value, over many lines.
    """
    found = _NO_PATH.search(message)
    # A class that is found as one kind, and lacks a key, is unknown as the other kind alone.
    is_found = "there is no key " in message
    if found and not is_found and not re.search(r"<class '(int|float)'>", message):
        return _unknown_class(found[1], message)

    path, reasons = [], []
    for line in (line.strip(" -") for line in message.splitlines()):
        if key := _KEY.match(line):
            path.append(key[1])
            line = line[key.end() :].strip()
        if line and not _NOISE.match(line):
            reasons.append(line)

    # A class may be of one kind or another: only the reading as its own kind is of interest.
    reasons = [reason for reason in reasons if not _OTHER_KIND.match(reason)] or reasons
    # A class was found, and lacks an argument: the other readings are of no interest.
    lacking = [found[1] for reason in reasons if (found := _REQUIRED.match(reason))]
    if lacking and path:
        return f"{'.'.join(path)}: set {lacking[0]} too; it has no default"

    # The same holds where a class was found, and has no such argument.
    unknown = [reason for reason in reasons if reason.startswith("there is no key ")]
    if unknown and path:
        return f"{'.'.join(path)}: {unknown[0]}"

    if kind := _wrong_kind(reasons, message):
        return f"{'.'.join(path)}: {kind}" if path else kind

    expected = [reason for reason in reasons if reason.startswith("Expected a")]
    # Several readings were possible: all are named. Otherwise the last reason is the most specific.
    text = _readable(
        "; ".join(expected)
        if len(expected) > 1
        else reasons[-1]
        if reasons
        else " ".join(message.split())
    )

    if not path:
        return text
    if (option := _OPTION.search(message)) and (nested := re.search(r"(?<=: )expected .*", text)):
        return f"{'.'.join(path)}.{option[1]}: {nested[0]}"
    return f"{'.'.join(path)}{'.' if _NESTED.match(text) else ': '}{text}"


def _wrong_kind(reasons: list[str], message: str) -> str | None:
    """Return what a value should be and what it is, or ``None`` if there is more to say."""
    kinds = []
    for reason in reasons:
        if found := _KIND.match(reason):
            kinds.append(found[1] or f"one of {found[2]}")
        elif not _NO_PATH.match(reason):
            return None
    value = _VALUE.search(message)
    if not kinds or value is None:
        return None
    return f"expected {' or '.join(kinds)}, got {value[1][:100]!r}"


def _readable(reason: str) -> str:
    if found := re.match(r"Option '([^']+)' is not accepted", reason):
        return f"there is no key {found[1]!r} here"
    if found := _ABSTRACT.match(reason):
        known = sorted(cls.__name__ for cls in _concrete(found[1], found[2]))
        return f"name the class before its keys; there are: {', '.join(known)}"
    return reason if len(reason) <= 400 else reason[:397] + "..."


def _unknown_class(name: str, message: str) -> str:
    found = re.findall(r"<class '([\w.]+)\.(\w+)'>", message)
    # Any module will do, and flsuite's own are those to choose from.
    bases = [_OWN.get(base, (module, base)) for module, base in found]
    known = sorted(
        {
            cls.__name__
            for module, base in bases
            if module.startswith("flsuite")
            for cls in _concrete(module, base)
        }
    )

    keys = _KEY.findall(message)
    there_are = f"there are: {', '.join(known)}, or a full path" if known else "give its full path"
    return f"{'.'.join(keys)}: there is no class {name}{_suggest(name, known)}; {there_are}"


def _concrete(module: str, base: str) -> Iterator[type]:
    todo = [getattr(importlib.import_module(module), base)]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        members = (inspect.getattr_static(cls, name) for name in dir(cls))
        if not cls.__name__.startswith("_") and not any(
            getattr(m, "__isabstractmethod__", False) for m in members
        ):
            yield cls


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the error of a class that is being instantiated, without the parser's additions.

    Raises:
        FlsuiteError: For any error, because a class that refuses its arguments refuses a setting.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FlsuiteError):
            cause = cause.__cause__ or cause.__context__
        raise (cause or FlsuiteError(essence(str(error)))) from None


def refuse_nulls(chosen: Any, path: str) -> None:
    """Refuse ``null`` for an argument that has another default and no such value.

    The parser passes every null on, as if the key were left out.

    Args:
        chosen: A value of the config. A class has ``class_path`` and ``init_args``.
        path: Its place in the config.

    Raises:
        FlsuiteError: If there is such an argument.
    """
    if isinstance(chosen, list):
        for index, item in enumerate(chosen):
            refuse_nulls(item, f"{path}[{index}]")
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("class_path"), str):
        return

    module, _, name = chosen["class_path"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    for name, value in (chosen.get("init_args") or {}).items():
        if value is None and not _takes_null(cls, name):
            raise FlsuiteError(f"{path}.{name}: expected a value, got null; leave the key out")
        refuse_nulls(value, f"{path}.{name}")


def _takes_null(cls: Any, name: str) -> bool:
    """Return whether an argument may be ``None``, or nothing is known of it."""
    for kind in inspect.getmro(cls) if inspect.isclass(cls) else ():
        function = vars(kind).get("__init__")
        if not inspect.isfunction(function):
            continue
        parameter = inspect.signature(function).parameters.get(name)
        if parameter is None:
            continue
        if parameter.default in (None, parameter.empty):
            return True
        try:
            hint = get_type_hints(function).get(name, Any)
        except Exception:  # a name that exists for type checkers alone
            return True
        return hint is Any or isinstance(hint, TypeVar) or type(None) in get_args(hint)
    return True


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def config_name(paths: Any, default: str) -> str:
    """Return the name of the last config file given.

    The ``config.yaml`` of a run's folder has the name of the run.
    """
    last = [Path(str(path)) for path in paths or []][-1:]
    if not last:
        return default
    return last[0].resolve().parent.parent.name if last[0].name == "config.yaml" else last[0].stem
