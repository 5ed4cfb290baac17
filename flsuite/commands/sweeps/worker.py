"""Processes that run the cells of a queue, each in a fork of a process with all imports done.

The server imports everything that a run needs, once. It forks the workers, and a worker forks one
process per cell. Server and workers do no computation, so their forks are like new processes.
"""

import atexit
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from flsuite.commands.sweeps.plan import Cell, fit_arguments
from flsuite.commands.sweeps.queue import Queue, measure, seconds_so_far
from flsuite.common.errors import FlsuiteError, one_line

FitCommand = Callable[[list[str]], int]
"""Runs ``flsuite fit`` with these arguments, and returns its exit status."""

_LOG = "log.txt"
_PAUSE = 0.5  # seconds between a worker's attempts to claim a cell while others run the rest
_ERROR = "flsuite: error: "
_INTERRUPTED = 130  # the exit status after Ctrl-C
_SIGNALLED = 128  # the exit status after a signal is above this


def run_workers(queue: Queue, fit: FitCommand) -> int:
    """Run the cells of a queue with the sweep's number of workers, and return an exit status."""
    children = _Children()
    workers = min(queue.sweep.workers, queue.size)
    for _ in range(workers):
        children.start(partial(_work, queue, fit))
    return max(abs(children.wait()) for _ in range(workers))


class _Children:
    """Forks of this process. SIGTERM is passed on to them.

    Attributes:
        is_stopping: Whether a SIGTERM was received.
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
        finally:  # a pending signal is passed on to this fork too
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def wait(self) -> int:
        """Wait for one child, and return its exit status, which is negative after a signal.

        The wait has no limit, because a run takes as long as it does.
        """
        child, status = os.wait()
        self._running.discard(child)
        return os.waitstatus_to_exitcode(status)

    def _stop(self, *_: object) -> None:
        self.is_stopping = True
        for child in self._running:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)


def fork(call: Callable[[], int]) -> int:
    """Run a function in a fork and return the process id. The function returns the exit status.

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
    """Ask the kernel to kill this process when its parent dies. This works only on Linux."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it has already died
        os._exit(1)


def _end(status: int) -> NoReturn:
    """End a fork: run its exit functions, flush its output, and skip the parent's code."""
    with suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _work(queue: Queue, fit: FitCommand) -> int:
    """Run one cell after another, until this start has no cells left."""
    children = _Children()
    try:
        while not (children.is_stopping or queue.is_over_for_now()):
            with queue.claim() as cell, queue.claim_seeds(cell) as others:
                if cell is not None:
                    _run_cells(queue, [cell, *others], fit, children)
            if cell is None:  # other workers run the rest, but may not finish them
                time.sleep(_PAUSE)
    except (FlsuiteError, OSError) as error:
        print(f"{_ERROR}{one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _run_cells(queue: Queue, cells: Sequence[Cell], fit: FitCommand, children: _Children) -> None:
    """Run claimed cells in one process, and mark each as done or failed, unless this one stops."""
    for cell in cells:
        queue.begin(cell)
    children.start(partial(_fit_cells, queue, cells, fit))
    status = children.wait()
    if children.is_stopping:
        return
    for cell in cells:
        if not queue.has_ended(cell):
            queue.fail(cell, _reason(status, queue.run_dir(cell) / _LOG))


def _fit_cells(queue: Queue, cells: Sequence[Cell], fit: FitCommand) -> int:
    """Run the fits of cells, each with its output in a file of its own."""
    logs = [
        os.open(queue.run_dir(cell) / _LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for cell in cells
    ]

    def enter(place: int) -> None:
        for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
            stream.flush()
            os.dup2(logs[place], number)

    enter(0)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    calls = [partial(_fit_cell, queue, cell, fit, len(cells)) for cell in cells]
    if len(calls) == 1:
        return calls[0]()
    from flsuite.common.turns import Turns  # late, because the import of torch takes a while

    Turns(calls, enter).take()
    return 0


def _fit_cell(queue: Queue, cell: Cell, fit: FitCommand, cells: int) -> int:
    """Run the fit of a cell, mark it as done or failed, and return the fit's exit status.

    An interrupted fit is neither. Of several cells, each takes its share of the time.
    """
    folder, began = queue.run_dir(cell), time.monotonic()
    before = seconds_so_far(folder)
    arguments = fit_arguments(queue.sweep, cell, queue.folder)
    print("$ flsuite fit", shlex.join(arguments))
    try:
        status = fit(arguments)
    except (Exception, SystemExit):  # a callback may call exit()
        traceback.print_exc()
        status = 1
    if status > _SIGNALLED:
        return status
    seconds = before + (time.monotonic() - began) / cells
    if status:
        queue.fail(cell, _reason(status, folder / _LOG))
        return status
    try:
        outcome = measure(folder, seconds)
    except (FlsuiteError, OSError, KeyError, ValueError) as error:
        queue.fail(cell, f"its scores cannot be read ({one_line(error)})")
        return 0
    if cell.is_trial and outcome.val is None:
        queue.fail(
            cell,
            f"no {outcome.monitor} on validation data to tune by; set data.val_fraction "
            "above 0, or trainer.monitor to a known score",
        )
    else:
        queue.finish(cell, outcome)
    return 0


def _reason(status: int, log: Path) -> str:
    """Return why a cell failed: its error line, or the last line that it printed."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"it was killed by {name}" + (", perhaps out of memory" * (name == "SIGKILL"))
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(_ERROR)]
    last = errors[-1].removeprefix(_ERROR) if errors else lines[-1] if lines else ""
    return f"{last[:400]} ({log})"
