"""Handling of SIGTERM, which clusters send before they reclaim a machine, and of SIGHUP.

A terminal sends SIGHUP when it closes.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Termination:
    """Records whether a signal was received.

    Attributes:
        status: The exit status after it, 128 and its number, by shell convention: 143 after
            SIGTERM, 129 after SIGHUP. It is 0 if there was none.
    """

    status = 0


@contextmanager
def ending_on_signals() -> Iterator[Termination]:
    """Interrupt the command on SIGTERM or SIGHUP, as Ctrl-C would.

    Further signals are ignored until the process ends, because clusters repeat the signal and the
    exit status must not change. A signal that is ignored at the start, as by nohup, remains so.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():  # signals belong to that thread
        yield termination
        return

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if before[number] != signal.SIG_IGN]

    def interrupt(number: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        termination.status = 128 + number
        raise KeyboardInterrupt

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield termination
    finally:
        if not termination.status:
            for number in handled:
                signal.signal(number, before[number])
