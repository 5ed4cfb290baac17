"""The process that workers are forked from.

It starts in one of two ways. A fork of this process has everything imported, shares its memory and
is there at once, but works only where no pool of threads and no accelerator is in use. Elsewhere it
is a new process. It imports torch and Lightning while this process goes on with other work.

This module imports nothing heavy, so that the new process can be started before anything else.
"""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any

_WORKER = "flsuite.engines.worker"
_GPUS = ("nvidiactl", "kfd", "dxg")  # in /dev: NVIDIA, AMD, and either under WSL


def prepare_workers() -> None:
    """Start the process that workers are forked from, unless it runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_WORKER])
    with without_main(), interrupts_ignored(), _forking() if _can_fork() else nullcontext():
        forkserver.ensure_running()


def prepare_workers_early() -> None:
    """Call :func:`prepare_workers` where that is possible before workers are needed.

    It is not in a worker, which may construct an engine that it has no use for, nor while a module
    is being imported. Workers would have it without its end.
    """
    if multiprocessing.parent_process() is None and not _is_importing():
        prepare_workers()


def can_fork_later() -> bool:
    """Return whether this process can probably be forked once torch has been imported.

    If not, workers are ready sooner if :func:`prepare_workers` is called before that.
    """
    return sys.platform == "linux" and not any(Path("/dev", name).exists() for name in _GPUS)


def _can_fork() -> bool:
    """Return whether a fork of this process has what a worker needs, and can do what it does.

    A pool of threads, as of OpenMP, waits in a fork for threads that are gone. A fork cannot use an
    accelerator that its parent has used, and would have no gradients if its parent has none. In a
    session, a module may be reloaded after the fork.
    """
    if _WORKER not in sys.modules or not can_fork_later() or hasattr(sys, "ps1") or _is_importing():
        return False
    import torch

    if not torch.is_grad_enabled() or torch.accelerator.is_available():
        return False
    return _has_only_own_threads() or (_dummy_fork() and _has_only_own_threads())


def _is_importing() -> bool:
    """Return whether a module is in the middle of its import, in any thread."""
    specs = [
        # A module that is loaded when it is first used must stay as it is.
        object.__getattribute__(module, "__dict__").get("__spec__")
        for module in list(sys.modules.values())
        # By type(): other objects in this dict say that they are modules.
        if issubclass(type(module), ModuleType)
    ]
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _has_only_own_threads() -> bool:
    """Return whether all threads are Python's, which takes care of their locks in a fork."""
    own = {thread.native_id for thread in threading.enumerate()}
    return own.issuperset(map(int, os.listdir("/proc/self/task")))


def _dummy_fork() -> bool:
    """Let libraries end the threads that they end before a fork.

    OpenBLAS, which numpy brings along, does so, and starts them again when it needs them.
    """
    with _quiet_forks():
        child = os.fork()
    if child == 0:
        os._exit(0)
    with suppress(ChildProcessError):  # this process ignores the end of its children
        os.waitpid(child, 0)
    return True


@contextmanager
def _quiet_forks() -> Iterator[None]:
    with warnings.catch_warnings():
        # Python warns of any second thread. They are checked above.
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        yield


@contextmanager
def _forking() -> Iterator[None]:
    """Let multiprocessing start its fork server as a fork of this process."""
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _run_in_fork  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _run_in_fork(path: Any, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run Python code in a fork, and return its process id.

    Args:
        path: Ignored.
        arguments: Of a new Python. The last one is the code.
        descriptors: Files that stay open.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(AttributeError, ValueError, OSError):  # there is none, or it is closed
            stream.flush()  # type: ignore[union-attr]
    with _quiet_forks():
        child = os.fork()
    if child:
        return child

    status = 1
    try:
        _be_new(descriptors)
        exec(arguments[-1], {})
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # the code after the fork belongs to the parent


def _be_new(descriptors: Sequence[int]) -> None:
    """Drop what a new process would not have."""
    sys.settrace(None)
    sys.setprofile(None)
    # New ones: a thread that was printing holds the locks of the old ones.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for which in signal.valid_signals():
        if callable(signal.getsignal(which)):
            signal.signal(which, signal.SIG_DFL)

    # Other processes wait until these files are closed. The numbers stay taken, because objects of
    # the parent may close them at any time.
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in descriptors:
            os.dup2(null, number)

    # The parent is in the middle of starting the fork server, and holds its lock.
    forkserver._forkserver._lock._at_fork_reinit()  # type: ignore[attr-defined]


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
def interrupts_ignored() -> Iterator[None]:
    """Let a new process inherit that Ctrl-C is ignored, because the parent handles it."""
    if threading.current_thread() is not threading.main_thread():  # signals belong to that thread
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
