"""The standard streams of the command: closed ones, and ones that cannot be written."""

import os
import sys
from contextlib import suppress

BROKEN_PIPE = 141
"""Exit status if the reader of the output has ended: 128 + 13, by shell convention."""


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


def output_fault() -> int:
    """Return 0, or the exit status if the standard output cannot be written, and say why.

    Later output is then discarded. A reader that has ended, as ``head`` does, is not an error.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        reason = error.strerror or type(error).__name__
        return complain(f"cannot write the output ({reason}); send it to another file", 2)
    return 0
