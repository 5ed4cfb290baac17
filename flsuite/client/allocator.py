"""How a process asks the operating system for memory."""

import ctypes
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_MMAP_MOST = 32 * 2**20  # the largest value that older versions of glibc take


@cache
def keep_freed_memory(kept: int = 512 * 2**20) -> None:
    """Keep freed memory for the next tensors of this process, on Linux with glibc.

    By default, glibc returns freed tensors of many megabytes to the system. The next ones are then
    new pages, which the system clears one by one when they are first written. For a stack of a
    hundred clients with 50,000 weights each, that takes a quarter of a round.

    Args:
        kept: Free memory that the process may keep, in bytes.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_TRIM_THRESHOLD, kept)
        if not mallopt(_MMAP_THRESHOLD, kept):
            mallopt(_MMAP_THRESHOLD, _MMAP_MOST)
