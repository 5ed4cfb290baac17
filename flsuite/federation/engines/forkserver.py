"""The server process that workers are forked from.

It starts in one of two ways. A fork of this process has everything imported, shares its memory and
starts at once, but works only if no thread pool and no accelerator is in use. Otherwise, it is a
new process, which imports torch and Lightning in parallel to this process.

This module imports nothing heavy, so the new process can be started before anything else.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any

_WORKER = "flsuite.federation.engines.wire"
_GPUS = ("nvidiactl", "kfd", "dxg")  # in /dev: NVIDIA, AMD, and both under WSL

# Held while a thread patches Python, so that another one does not restore the patch. The wait for
# it has no limit, because it is held only while a process starts.
_patching = threading.RLock()

# The code of a new server process. It may not have the import path of this process.
_SERVE = """
try:
    from flsuite.federation.engines.forkserver import serve_forks
except ImportError:
    serve_forks = exec
serve_forks({code!r})
"""


def prepare_workers() -> None:
    """Start the server process that workers are forked from, unless it is running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_WORKER])
    with without_main(), interrupts_ignored(), _forking():
        forkserver.ensure_running()


def prepare_workers_early() -> None:
    """Call :func:`prepare_workers` before workers are needed, if possible.

    It is not possible in a worker, which may construct an engine that it does not use, nor during
    the import of a module, which workers would inherit incomplete.
    """
    if multiprocessing.parent_process() is None and not _is_importing():
        prepare_workers()


def can_fork_later() -> bool:
    """Return whether this process can probably be forked after torch is imported.

    If not, calling :func:`prepare_workers` before the import makes workers available sooner.
    """
    return sys.platform == "linux" and not any(Path("/dev", name).exists() for name in _GPUS)


def _can_fork() -> bool:
    """Return whether a fork of this process can serve as a worker.

    In a fork, a thread pool, such as OpenMP's, waits for threads that no longer exist. A fork
    cannot use an accelerator that its parent has used, and inherits disabled gradients. In an
    interactive session, a module may be reloaded after the fork.
    """
    if _WORKER not in sys.modules or not can_fork_later() or hasattr(sys, "ps1") or _is_importing():
        return False
    import torch

    if not torch.is_grad_enabled() or torch.accelerator.is_available():
        return False
    if not _has_only_own_threads():
        _dummy_fork()
    return _has_only_own_threads()


def _is_importing() -> bool:
    """Return whether any thread is importing a module."""
    specs = [
        # Bypass __getattribute__, to keep lazy modules unloaded.
        object.__getattribute__(module, "__dict__").get("__spec__")
        for module in list(sys.modules.values())
        # Use type(), because other objects in this dict claim to be modules.
        if issubclass(type(module), ModuleType)
    ]
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _has_only_own_threads() -> bool:
    """Return whether all threads are Python threads, whose locks a fork handles."""
    own = {thread.native_id for thread in threading.enumerate()}
    return own.issuperset(map(int, os.listdir("/proc/self/task")))


def _dummy_fork() -> None:
    """Let libraries stop the threads that they stop before a fork.

    OpenBLAS, which numpy ships, does this, and restarts the threads on demand.
    """
    with _quiet_forks():
        child = os.fork()
    if child == 0:
        os._exit(0)
    with suppress(ChildProcessError):  # this process ignores SIGCHLD
        os.waitpid(child, 0)  # without a limit, because it ends at once


@contextmanager
def _quiet_forks() -> Iterator[None]:
    with warnings.catch_warnings():
        # Python warns about any second thread. The caller has checked the threads.
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        yield


@contextmanager
def _forking() -> Iterator[None]:
    """Make multiprocessing start its fork server as a fork of this process, if possible.

    The check takes a while, so it waits until multiprocessing starts one: most often, one runs.
    """

    def start(path: Any, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if _can_fork():
            return _run_in_fork(path, arguments, descriptors)
        code = _SERVE.format(code=arguments[-1])
        return spawn(path, [*arguments[:-1], code], descriptors)

    with _patching:
        spawn = util.spawnv_passfds
        util.spawnv_passfds = start  # type: ignore[assignment]
        try:
            yield
        finally:
            util.spawnv_passfds = spawn


def serve_forks(code: str) -> None:
    """Run the code of multiprocessing's fork server until all of its clients have ended.

    A killed client leaves two things to the server: the folder of the server's socket, which the
    client would have removed, and a fork that waits for the rest of its message, which prints an
    error.
    """
    sys.excepthook = _excepthook
    try:
        exec(code, {})
    finally:
        address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        with suppress(OSError, TypeError):  # removed by the client, or there is none
            os.unlink(address)
            os.rmdir(os.path.dirname(address))  # unless it has other files


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not issubclass(kind, (EOFError, pickle.UnpicklingError)):
        sys.__excepthook__(kind, error, trace)


def _run_in_fork(path: Any, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run Python code in a fork, and return its process id.

    Args:
        path: Ignored.
        arguments: Arguments of a new Python process. The last one is the code.
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
        serve_forks(arguments[-1])
        status = 0
    except SystemExit:
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # the code after the fork belongs to the parent


def _be_new(descriptors: Sequence[int]) -> None:
    """Drop the state that a new process would not have."""
    sys.settrace(None)
    sys.setprofile(None)
    # New streams, because a printing thread may hold the locks of the old ones.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for which in signal.valid_signals():
        if callable(signal.getsignal(which)):
            signal.signal(which, signal.SIG_DFL)

    # Close inherited files, because other processes wait for that. Keep the numbers reserved,
    # because objects of the parent may close them at any time.
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in descriptors:
            os.dup2(null, number)

    # The parent holds these locks while it starts the fork server.
    forkserver._forkserver._lock._at_fork_reinit()  # type: ignore[attr-defined]
    # The parent's own server has a socket that is not this process's to remove.
    forkserver._forkserver._forkserver_address = None  # type: ignore[attr-defined]
    _patching._at_fork_reinit()  # type: ignore[attr-defined]


@contextmanager
def without_main() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in every worker.

    It would run the script to find its definitions. cloudpickle sends the definitions, so a script
    needs no ``__main__`` guard.
    """
    main = sys.modules["__main__"]
    names = "__file__", "__spec__"  # where multiprocessing looks for the script
    with _patching:
        hidden = {name: getattr(main, name) for name in names if hasattr(main, name)}
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
    """Ignore SIGINT in new processes, because the parent handles Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # only it sets handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
