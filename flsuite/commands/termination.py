"""SIGTERM, which clusters send before they take a machine away."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 143
"""The exit status after SIGTERM, 128 + 15 by the convention of shells."""


class Termination:
    """Says whether a SIGTERM has come."""

    has_come = False


@contextmanager
def ending_on_sigterm() -> Iterator[Termination]:
    """Interrupt the command when a SIGTERM comes, as Ctrl-C would.

    Further ones are ignored until the process ends: clusters repeat it, and the status must stay.
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
