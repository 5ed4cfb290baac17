"""A parser whose errors are one line."""

import ast
import inspect
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn, TypeVar, get_args

from jsonargparse import Namespace
from jsonargparse._typehints import get_all_subclass_paths
from jsonargparse._util import import_object
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from flsuite.commands.describing import in_words, options_of, parameters_of
from flsuite.commands.typos import did_you_mean, nearest, nearest_key
from flsuite.common.arguments import create
from flsuite.common.errors import FlsuiteError, one_line, with_place

_LONGEST = 400
_NO_CLASS = "Expected a dot import path string: "
_NOT_ACCEPTED = re.compile(r"Option '(.*)' is not accepted")


class _RefusedError(FlsuiteError, ValueError):
    """A value that a parser refuses. It is a ValueError, so that the parsers around add their keys.

    Attributes:
        key: Dotted path of the value below the parser's keys; empty if no single key is at fault.
        reason: What is wrong with the value.
    """

    def __init__(self, reason: str, key: str = "") -> None:
        super().__init__(f"{key}: {reason}" if key else reason)
        self.key, self.reason = key, reason


# Errors from the parsers of nested classes during the current parse. The outer parser tries every
# reading of a type, but its error is chained to the first one only.
_refused: deque[_RefusedError] = deque(maxlen=100)


class OneLineParser(LightningArgumentParser):
    """LightningCLI's parser, which raises each error as a one-line :class:`FlsuiteError`.

    ``save_dir`` of a logger is optional: its files go to the run's folder, which is known later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        if not _needs_save_dir(class_type):
            return super().add_class_arguments(class_type, *args, **kwargs)
        kwargs["skip"] = {*(kwargs.get("skip") or ()), "save_dir"}
        added = super().add_class_arguments(class_type, *args, **kwargs)
        self.add_argument("--save_dir", type=str | Path, default="", help="Default: the run's.")
        return [*added, "save_dir"]

    def instantiate(self, namespace: Any, *args: Any, **kwargs: Any) -> Any:
        """Create the objects of a config, and keep the arguments that they do not store."""
        ours = [*(kwargs.pop("instantiators", None) or ()), (create, object, True)]
        return super().instantiate(namespace, *args, instantiators=ours, **kwargs)

    def parse_command(self, args: list[str] | None = None) -> Namespace:
        """Parse the arguments of a command. (``parse_args`` is also called for nested classes.)"""
        _refused.clear()
        return self.parse_args(args)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        _refused.append(self._refusal(message, ex))
        raise _refused[-1] from ex

    def _refusal(self, message: str, ex: Exception | None) -> _RefusedError:
        """Return the error that names the innermost key and the reason."""
        # Misspelled options were refused before, by refuse_typos.
        if unknown := message.partition("unrecognized arguments: ")[2].partition(" ")[0]:
            return _RefusedError(f"unknown key {unknown}")

        reason: BaseException | None = ex
        while reason and reason.__cause__ and not isinstance(reason.__cause__, KeyError):
            reason = reason.__cause__
        text = one_line(reason, _LONGEST) if reason else message
        missing = text.partition("arguments are required: ")[2]
        key = missing.rpartition(".")[2]
        if key in ("model", "data"):
            return _RefusedError(f"there is no {key}; add {key} to the config, or give --{key}")
        if not message.startswith('Parser key "'):
            option = _NOT_ACCEPTED.fullmatch(text)
            return self._unknown(option[1]) if option else _RefusedError(text)

        key = message.split('"')[1]
        inner = next((refused for refused in reversed(_refused) if str(refused) in message), None)
        if inner is not None:
            return _RefusedError(inner.reason, f"{key}.{inner.key}" if inner.key else key)
        kind = next((getattr(a, "_typehint", None) for a in self._actions if a.dest == key), None)
        return _RefusedError(text if kind is None else _expected(kind, text, message), key)

    def _unknown(self, key: str) -> _RefusedError:
        """Return the error for an argument that the class of this parser does not have."""
        dests = (action.dest for action in self._actions)
        known = [name for name in dests if name != "help" and not name.endswith(".help")]
        meant = nearest_key(key, known, ())
        hint = did_you_mean(meant, f"; there are: {', '.join(known) or 'none'}")
        return _RefusedError(f"unknown key{hint}", key)


def _needs_save_dir(class_type: Any) -> bool:
    """Return whether a class is a logger with a required ``save_dir``."""
    if not (inspect.isclass(class_type) and issubclass(class_type, Logger)):
        return False
    parameter = inspect.signature(class_type).parameters.get("save_dir")
    return parameter is not None and parameter.default is parameter.empty


def _expected(hint: Any, text: str, message: str) -> str:
    """Return the expected kind of value and the value that was given, as one message.

    Args:
        hint: The argument's type.
        text: The message of jsonargparse about the first reading of that type.
        message: Its message about all readings. The value comes last.
    """
    known = sorted({path.rpartition(".")[2] for path in get_all_subclass_paths(hint)})
    if text.endswith("is abstract"):
        path = text.split()[-3]
        name = path.rpartition(".")[2]
        missing = getattr(locate(path), "__abstractmethods__", ())
        if missing and not path.startswith("flsuite."):
            return f"{name} lacks {', '.join(sorted(missing))}; write what its base class asks for"
        return f"name a specific {name}: {', '.join(known)}, or my_module.Name"
    if not text.startswith(("Expected a", "Not a valid subclass", "Unexpected import path")):
        return text
    is_name = text.startswith(_NO_CLASS)
    value = text[len(_NO_CLASS) :] if is_name else message.rpartition(" value: ")[2].strip()
    wrong = f"expected {in_words(hint)}, got {_shown(value)}"
    # A wrong number or text is not intended as a class.
    may_be_class = not text.startswith(("Expected a <class", "Unexpected"))
    if not may_be_class or (_NO_CLASS not in message and "Not a valid subclass" not in message):
        near = nearest(value, (option.words for option in options_of(hint)))
        return wrong + did_you_mean(near)
    all_known = f" (there are: {', '.join(known)}, or my_module.Name)"
    return wrong + did_you_mean(nearest(value, known), all_known)


def _shown(value: str) -> str:
    """Return the value as a Python literal. The parser's message omits the quotes of a text."""
    try:
        shown = repr(ast.literal_eval(value))
    except (SyntaxError, ValueError):
        shown = repr(value)
    return f"{shown[:100]}..." if len(shown) > 100 else shown


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise errors of a class's constructor without the parser's additions.

    Raises:
        FlsuiteError: For any error, because the arguments come from the settings.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, FlsuiteError):
            cause = cause.__cause__ or cause.__context__
        text = with_place(error, _reading(error), _LONGEST)
        if "before Module.__init__() call" in text:
            text += "; call super().__init__() first"
        raise (cause or FlsuiteError(text)) from None


def _reading(error: Exception) -> str:
    """Return why a class refused its arguments, for a key that takes several kinds of value.

    The parser lists one reason per kind, nested for an argument's own kinds. All but one only state
    that the class is of another kind. The result is empty if no other reason is listed.
    """
    reasons: list[str] = []
    for line in map(str.strip, str(error).splitlines()):
        if line.startswith("- "):
            reasons.append(line[2:])
        elif reasons and not line.startswith("Given value"):  # a reason's next line
            reasons[-1] += f" {line}"
    others = ("Import path", "Expected a", "Does not validate")
    specific = [text for text in reasons if not text.startswith(others)]
    return specific[0] if specific else ""


def refuse_nulls(chosen: Any, path: str) -> None:
    """Refuse ``null`` for an argument whose type excludes it.

    The parser accepts null for every key.

    Args:
        chosen: A value of the config. A class has ``class_path`` and ``init_args``.
        path: Its dotted path in the config.

    Raises:
        FlsuiteError: If an argument is null that must not be.
    """
    if isinstance(chosen, list):
        for index, item in enumerate(chosen):
            refuse_nulls(item, f"{path}[{index}]")
    if not isinstance(chosen, Mapping) or not isinstance(chosen.get("class_path"), str):
        return

    cls = import_object(chosen["class_path"])
    for name, value in (chosen.get("init_args") or {}).items():
        if value is None and not _takes_null(cls, name):
            how = "give one, or leave the key out if it has a default"
            raise FlsuiteError(f"{path}.{name}: expected a value, got null; {how}")
        refuse_nulls(value, f"{path}.{name}")


def _takes_null(cls: Any, name: str) -> bool:
    """Return whether an argument may be ``None``, or its type is unknown."""
    argument = parameters_of(cls).get(name)
    if argument is None or argument.default is None:
        return True
    hint = argument.annotation
    if argument.default is inspect.Parameter.empty:  # without a type, a missing value is null
        return hint is not inspect.Parameter.empty
    return hint is Any or isinstance(hint, TypeVar) or type(None) in get_args(hint)


def config_name(paths: Any, default: str) -> str:
    """Return the name of the last config file given.

    For the ``config.yaml`` of the run ``runs/NAME/TIME-SEED``, return ``NAME``. For the one of the
    run ``runs/NAME``, return ``NAME-again``, because ``runs/NAME`` is taken.
    """
    last = [Path(str(path)) for path in paths or []][-1:]
    if not last:
        return default
    folder = last[0].resolve().parent
    if last[0].name != "config.yaml" or not (folder / "settings.yaml").exists():
        return last[0].stem
    return f"{folder.name}-again" if folder.parent.name == "runs" else folder.parent.name
