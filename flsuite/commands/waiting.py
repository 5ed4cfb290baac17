"""A line on the terminal during long imports."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
