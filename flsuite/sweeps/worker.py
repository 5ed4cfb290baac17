"""Processes that run the cells of a queue, each cell in a fork of one that has imported everything.

The server imports what a run needs, once. It forks the workers, and a worker forks a process per
cell. Server and workers compute nothing, so that a fork of them is like a new process.
"""

import atexit
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from flsuite.errors import FlsuiteError, one_line
from flsuite.sweeps.outcome import measure, seconds_so_far
from flsuite.sweeps.plan import Cell, fit_arguments
from flsuite.sweeps.queue import Queue

Fit = Callable[[list[str]], int]
"""Runs ``flsuite fit`` with these arguments, and returns its exit status."""

_LOG = "log.txt"
_PAUSE = 0.5  # seconds until a worker looks again for a cell, when others run all that are left
_ERROR = "flsuite: error: "
_INTERRUPTED = 130  # the exit status after Ctrl-C


def run_workers(queue: Queue, fit: Fit) -> int:
    """Run the cells of a queue, as many at a time as the sweep says, and return an exit status."""
    children = _Children()
    workers = min(queue.sweep.workers, queue.size)
    for _ in range(workers):
        children.start(partial(_work, queue, fit))
    return max(abs(children.wait()) for _ in range(workers))


class _Children:
    """Forks of this process. A SIGTERM that reaches this process is passed on to them.

    Attributes:
        is_stopping: Whether a SIGTERM has come.
    """

    def __init__(self) -> None:
        self.is_stopping = False
        self._running: set[int] = set()
        signal.signal(signal.SIGTERM, self._stop)

    def start(self, call: Callable[[], int]) -> None:
        """Run a function in a fork, see :func:`fork`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self._running.add(fork(call))
        finally:  # a signal that has waited is passed on to this fork too
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait(self) -> int:
        """Wait for one of them, and return its exit status, negative if a signal has ended it."""
        child, status = os.wait()
        self._running.discard(child)
        return os.waitstatus_to_exitcode(status)

    def _stop(self, *_: object) -> None:
        self.is_stopping = True
        for child in self._running:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)


def fork(call: Callable[[], int]) -> int:
    """Start a function in a fork, which ends with its exit status, and return the process id.

    A SIGTERM interrupts the fork as Ctrl-C would. On Linux the fork dies with this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child:
        return child

    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        die_with(parent)
        status = call()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)  # the code after the fork belongs to the parent


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent has died. Only Linux can."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it has died before
        os._exit(1)


def _end(status: int) -> NoReturn:
    """End a fork, with what its libraries want to do at the end, and nothing of its parent."""
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _work(queue: Queue, fit: Fit) -> int:
    """Run one cell after another, until nothing is left that this start may run."""
    children = _Children()
    try:
        while not (children.is_stopping or queue.is_over_for_now()):
            with queue.claim() as cell:
                if cell is not None:
                    _run_cell(queue, cell, fit, children)
            if cell is None:  # the others are being run elsewhere, and may be left undone there
                time.sleep(_PAUSE)
    except (FlsuiteError, OSError) as error:
        print(f"{_ERROR}{one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _run_cell(queue: Queue, cell: Cell, fit: Fit, children: _Children) -> None:
    """Run a claimed cell, and mark it as done or failed, unless this process is to stop."""
    folder = queue.begin(cell)
    arguments = fit_arguments(queue.sweep, cell, queue.folder)
    before, began = seconds_so_far(folder), time.monotonic()
    children.start(partial(_fit_in_log, fit, arguments, folder / _LOG))
    status = children.wait()
    if children.is_stopping:
        return

    seconds = before + time.monotonic() - began
    if status:
        queue.fail(cell, _reason(status, folder / _LOG))
        return
    try:
        outcome = measure(folder, seconds)
    except (FlsuiteError, OSError, KeyError, ValueError) as error:
        queue.fail(cell, f"its scores cannot be read ({one_line(error)})")
        return
    if cell.is_trial and outcome.val is None:
        queue.fail(
            cell,
            f"there is no {outcome.monitor} on validation data to tune by; set data.val_fraction "
            "above 0, or trainer.monitor to a score of the suite",
        )
    else:
        queue.finish(cell, outcome)


def _fit_in_log(fit: Fit, arguments: list[str], log: Path) -> int:
    """Run a fit, with all that it prints in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    print("$ flsuite fit", shlex.join(arguments))
    return fit(arguments)


def _reason(status: int, log: Path) -> str:
    """Return why a cell failed: the line of its error, or the last line that it printed."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"it was ended by {name}" + (", perhaps for want of memory" * (name == "SIGKILL"))
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(_ERROR)]
    last = errors[-1].removeprefix(_ERROR) if errors else lines[-1] if lines else ""
    return f"{last[:400]} ({log})"
