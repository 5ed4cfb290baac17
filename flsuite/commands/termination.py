"""Handling of SIGTERM, which clusters send before they reclaim a machine."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 143
"""Exit status after SIGTERM: 128 + 15, by shell convention."""


class Termination:
    """Records whether a SIGTERM was received."""

    has_come = False


@contextmanager
def ending_on_sigterm() -> Iterator[Termination]:
    """Interrupt the command on SIGTERM, as Ctrl-C would.

    Further SIGTERMs are ignored until the process ends, because clusters repeat the signal and the
    exit status must not change.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():  # signals belong to that thread
        yield termination
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        termination.has_come = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield termination
    finally:
        if not termination.has_come:
            signal.signal(signal.SIGTERM, before)
