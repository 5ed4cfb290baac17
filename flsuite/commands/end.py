"""The end of the process, at once."""

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
    """End this process without taking apart what torch and Lightning have made.

    The system frees it anyway, and Python would take more than a second for it. What a user may
    rely on at an exit happens: functions of :mod:`atexit`, and open files are written to the disk.
    Where others wait for the end of this function, as a thread or a debugger, it just returns.
    """
    watched = sys.gettrace() or sys.getprofile() or _is_monitored() or sys.flags.inspect
    if watched or threading.active_count() > 1:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to stop
    atexit._run_exitfuncs()
    # A text file writes into a binary one, which comes after it. Asking an object itself for its
    # class may call code of its own.
    objects = gc.get_objects()
    texts = [file for file in objects if issubclass(type(file), io.TextIOWrapper)]
    binaries = [file for file in objects if issubclass(type(file), _BINARY)]
    for file in (*texts, *binaries):
        with suppress(AttributeError, ValueError, OSError):  # closed, or not for writing
            file.flush()
    os._exit(status)


def _is_monitored() -> bool:
    """Return whether a profiler or a debugger has registered, which it can from Python 3.12 on."""
    monitoring = getattr(sys, "monitoring", None)
    return monitoring is not None and any(monitoring.get_tool(place) for place in range(6))
