"""The standard streams of the command: closed ones, and ones that cannot be written."""

import os
import sys
from contextlib import suppress


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
