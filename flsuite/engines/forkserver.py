"""The process that workers are forked from.

This module imports nothing heavy, so that the process can be started before anything else.
"""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

__all__ = ["prepare_workers", "without_main"]


def prepare_workers() -> None:
    """Start the process that workers are forked from.

    It imports torch and Lightning while this process goes on with other work.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flsuite.engines.worker"])
    with without_main(), _interrupts_ignored():
        forkserver.ensure_running()


@contextmanager
def without_main() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in every worker.

    It would run the script to find what the script defines. cloudpickle sends the definitions
    along, so that a script needs no ``__main__`` guard.
    """
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    # multiprocessing looks for the script in these two attributes.
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__

    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let a new process inherit that Ctrl-C is ignored, because the parent handles it."""
    if threading.current_thread() is not threading.main_thread():  # signals belong to that thread
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
