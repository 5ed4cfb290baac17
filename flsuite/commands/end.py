"""A fast exit of the process."""

import atexit
import gc
import io
import os
import signal
import sys
import threading
from contextlib import suppress

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
