"""The memory allocator of this process."""

import ctypes
import sys
from functools import cache

_KEPT = 512 * 2**20  # bytes of free memory that the process may keep
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_MMAP_MOST = 32 * 2**20  # the largest value that older versions of glibc take


@cache
def keep_freed_memory() -> None:
    """Keep freed memory for the next tensors of this process, on Linux with glibc.

    By default, glibc returns freed tensors of many megabytes to the system. The next ones are then
    new pages, which the system clears one by one when they are first written. In a large stack of
    clients, that takes a good part of a round.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_TRIM_THRESHOLD, _KEPT)
        if not mallopt(_MMAP_THRESHOLD, _KEPT):
            mallopt(_MMAP_THRESHOLD, _MMAP_MOST)
