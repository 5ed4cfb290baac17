"""The exceptions of flsuite, argument checks that raise them, words of their messages, the log."""

import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

log = logging.getLogger("flsuite")
"""What the federation tells people while it runs."""


class FlsuiteError(Exception):
    """A request that cannot be fulfilled.

    The message says what to change. The command prints it as one line and exits with status 2. A
    message is a single sentence that names the argument and, where applicable, the client and the
    round. Several messages are several lines. This class is not a ValueError, because parsers catch
    those to try another reading.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class FederationError(RuntimeError):
    """A run that cannot continue.

    The run folder keeps the last state that it reached.

    Attributes:
        result: What is known all the same, for other programs.
    """

    result: Mapping[str, Any] = {}


def one_line(error: object, longest: int | None = None) -> str:
    """Return an error's message on one line, or the class name if it has no message.

    Control characters are escaped, because a message may come from another machine, and a terminal
    would obey them.

    Args:
        error: Any exception, or a message. Messages from libraries may span many lines.
        longest: Maximum number of characters. Default: no limit.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # from the __str__ of a user's own class
        text = f"{type(error).__name__}, whose message cannot be read"
    message = text or type(error).__name__
    if not message.isprintable():
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        message = "".join(shown)
    is_long = longest is not None and len(message) > longest
    return f"{message[:longest]}..." if is_long else message


@contextmanager
def refused_as(what: str, remedy: str, longest: int | None = None) -> Iterator[None]:
    """Refuse with one line whatever a block raises. A :class:`FlsuiteError` passes unchanged.

    Sockets, archives, parsers and disks each have their own exceptions.

    Args:
        what: What does not work. The reason follows in parentheses.
        remedy: What to do.
        longest: Maximum number of characters of the reason. Default: no limit.
    """
    try:
        yield
    except FlsuiteError:
        raise
    except Exception as error:
        raise FlsuiteError(f"{what} ({one_line(error, longest)}); {remedy}") from error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, as ``add_note`` of Python 3.11 does. The command prints it, too."""
    error.__notes__ = [*notes_of(error), note]  # type: ignore[attr-defined,unused-ignore]


def notes_of(error: BaseException) -> list[str]:
    """Return the notes that were added to an error."""
    return list(getattr(error, "__notes__", ()))


_OUT_OF_MEMORY = ("out of memory", "not enough memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory could not be allocated. torch raises a RuntimeError for that."""
    if isinstance(error, RuntimeError):
        return any(words in one_line(error).lower() for words in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def with_place(error: BaseException, text: str = "", longest: int | None = None) -> str:
    """Return an error's message with the line and the method of the user's code that raised it.

    Args:
        error: The error.
        text: Its message. Default: :func:`one_line`.
        longest: Maximum number of characters of the default.
    """
    place = place_of(error)
    return (text or one_line(error, longest)) + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str:
    """Return file, line and method of the user's code that raised an error, or an empty text."""
    libraries = (str(Path(__file__).parents[1]), sys.prefix, sysconfig.get_path("stdlib"), "<")
    cause: BaseException | None = error
    own: list[tuple[CodeType, int]] = []
    while cause is not None:
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
        own = [at for at in frames if not at[0].co_filename.startswith(libraries)] or own
        cause = cause.__cause__ or cause.__context__
    if not own:
        return ""
    code, line = own[-1]
    method = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
    within = "" if method.startswith("<") else f", in {method}"
    return f"{Path(code.co_filename).name}, line {line}{within}"


def likeliest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.65) -> list[str]:
    """Return the existing names whose spelling is most similar to a wrong name.

    Args:
        name: The wrong name.
        known: The existing names.
        most: Maximum number of names to return.
        cutoff: Minimum similarity. 1 stands for equal names, where the case of letters is ignored.
    """
    import difflib

    spellings: dict[str, list[str]] = {}
    for other in known:
        spellings.setdefault(other.lower(), []).append(other)
    close = difflib.get_close_matches(name.lower(), spellings, most, cutoff)
    return [other for near in close for other in spellings[near]][:most]


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as text, and how many there are more."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def path_of(obj: Callable[..., Any] | type) -> str:
    """Return the full path of a class or a function."""
    return f"{obj.__module__}.{obj.__qualname__}"


def require_one_of(owner: str, choices: Iterable[str], **values: str) -> None:
    """Refuse a value that is not one of the choices."""
    choices = tuple(choices)
    for name, value in values.items():
        if value not in choices:
            raise FlsuiteError(
                f"{owner}: {name} must be one of {', '.join(choices)}, got {value!r}"
            )


def require_instance(owner: str, kind: type, **values: object) -> None:
    """Refuse an object that is not an instance of ``kind``."""
    for name, value in values.items():
        if not isinstance(value, kind):
            got = type(value).__name__
            raise FlsuiteError(f"{owner}: {name} must be a {path_of(kind)}, got {got}")


def require_extra(owner: str, packages: tuple[str, ...], extra: str) -> None:
    """Raise an error unless one of these packages is installed.

    Args:
        owner: The feature that requires it.
        packages: Alternative packages. One of them is enough.
        extra: The extra of flsuite that installs one of them.

    Raises:
        FlsuiteError: If none of them is installed.
    """
    if not any(find_spec(package) for package in packages):
        raise FlsuiteError(f"{owner} needs {packages[0]}: pip install 'flsuite[{extra}]'")
