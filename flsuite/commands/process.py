"""The process of the command: its streams, its signals and its end.

Clusters send SIGTERM before they reclaim a machine. A terminal sends SIGHUP when it closes.
"""

import atexit
import gc
import io
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

_BINARY = (io.BufferedWriter, io.BufferedRandom)


def end_process(status: int) -> None:
    """End this process without Python's cleanup of torch and Lightning.

    The cleanup takes more than a second, and the operating system frees the memory anyway. Exit
    functions of :mod:`atexit` still run, and open files are flushed. If other threads, a debugger
    or a profiler are active, the function just returns.
    """
    watched = sys.gettrace() or sys.getprofile() or _is_monitored() or sys.flags.inspect
    if watched or threading.active_count() > 1:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to stop
    atexit._run_exitfuncs()
    # Text files write into binary ones, so they are flushed first. isinstance may run code of the
    # object, type does not.
    objects = gc.get_objects()
    texts = [file for file in objects if issubclass(type(file), io.TextIOWrapper)]
    binaries = [file for file in objects if issubclass(type(file), _BINARY)]
    for file in (*texts, *binaries):
        with suppress(AttributeError, ValueError, OSError):  # closed, or not for writing
            file.flush()
    os._exit(status)


def _is_monitored() -> bool:
    """Return whether a profiler or debugger has registered (possible since Python 3.12)."""
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(place) for place in range(6))


def open_streams() -> None:
    """Open closed standard streams on the null device.

    Python sets them to ``None``, and the next file that is opened would get their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)  # for workers
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


VERSION = 1  # of the object of --json: the next one if a key goes or changes, not if one comes


class Ending(NamedTuple):
    """How a subcommand has ended.

    Attributes:
        status: The exit status.
        lines: The errors.
        result: What other programs learn.
    """

    status: int = 0
    lines: Sequence[str] = ()
    result: Mapping[str, Any] = {}


@contextmanager
def answering(command: str) -> Iterator[dict[str, Any]]:
    """Print one JSON object to the standard output, and everything else to the standard error.

    Yields:
        The object, to be filled. Without a status, the block has failed in an unexpected way.
    """
    answer: dict[str, Any] = {"version": VERSION, "command": command, "status": 1, "message": ""}
    output, sys.stdout = sys.stdout, sys.stderr
    # Workers write to the same number. It is not the stream of a program that calls this function.
    kept = os.dup(1) if output is sys.__stdout__ else None
    if kept is not None:
        output.flush()
        os.dup2(2, 1)
    try:
        yield answer
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # as after --print_config
            answer["status"] = 0
            raise
        text = " ".join(str(error).split()) or "no message"
        answer["message"] = f"{type(error).__name__}: {text}"
        raise
    finally:
        sys.stdout = output
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
        print(json.dumps(_finite(answer)), flush=True)


def _finite(value: Any) -> Any:
    """Return plain data for JSON, which has no infinite numbers and no NaN."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def complain(message: str, status: int) -> int:
    """Print an error as one line, and return the exit status."""
    with suppress(OSError):  # the status remains if the line cannot be written
        print(f"flsuite: error: {message}", file=sys.stderr, flush=True)
    return status


def output_fault(raised: OSError | None = None) -> int:
    """Return 0, or the exit status if the standard output cannot be written, and say why.

    Later output is then discarded. A reader that has ended, as ``head`` does, is not an error.

    Args:
        raised: An error whose cause may be the output. A written line shows it.
    """
    if raised is not None and raised.filename is not None:
        return 0
    try:
        print(end="" if raised is None else "\n", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1  # as rich does
        reason = error.strerror or type(error).__name__
        return complain(f"cannot write the output ({reason}); send it to another file", 2)
    return 0


_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Termination:
    """Records whether a signal was received.

    Attributes:
        status: The exit status after it, 128 and its number, by shell convention: 143 after
            SIGTERM, 129 after SIGHUP. It is 0 if there was none.
    """

    status = 0


@contextmanager
def ending_on_signals() -> Iterator[_Termination]:
    """Interrupt the command on SIGTERM or SIGHUP, as Ctrl-C would.

    Further signals are ignored until the process ends, because clusters repeat the signal and the
    exit status must not change. A signal that is ignored at the start, as by nohup, remains so.
    """
    termination = _Termination()
    if threading.current_thread() is not threading.main_thread():  # signals belong to that thread
        yield termination
        return

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]

    def interrupt(number: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        termination.status = 128 + number
        raise KeyboardInterrupt

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield termination
    finally:
        if not termination.status:
            for number in handled:
                signal.signal(number, before[number])


_ERASE = "\r\x1b[K"


@contextmanager
def waiting(task: str) -> Iterator[None]:
    """Show the current task, and erase it at the end. Nothing is written to a file or pipe."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{task} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(_ERASE, end="", file=sys.stderr, flush=True)
