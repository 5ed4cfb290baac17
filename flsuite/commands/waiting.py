"""A line on the terminal while nothing else is to be seen."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ERASE = "\r\x1b[K"


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show what takes seconds, and erase it at the end. Nothing is written into a file or pipe."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(_ERASE, end="", file=sys.stderr, flush=True)
