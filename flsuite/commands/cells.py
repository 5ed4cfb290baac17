"""The process that a sweep's cells are forked from. It imports what a run needs, once.

It reads a sweep and its folder from standard input, checks that every method can start, prints the
result, and runs the cells on request.
"""

import gc
import json
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flsuite.commands.main import run_command, work_here
from flsuite.commands.request import import_plugins
from flsuite.commands.sweeps.plan import Cell, fit_arguments, require_distinct, samples_of
from flsuite.commands.sweeps.queue import DONE, Queue
from flsuite.commands.sweeps.reading import Sweep
from flsuite.commands.sweeps.worker import die_with, fork, run_workers
from flsuite.commands.typos import refuse_typos
from flsuite.common.errors import FlsuiteError, one_line, with_place

if TYPE_CHECKING:
    from flsuite.trainer import FederatedTrainer

_ONE_A_PROCESS = ("WandbLogger", "CometLogger")  # loggers of which a process has one
_CELLS_PER_CHECK, _MOST_CHECKS = 8, 8  # each process that checks cells loads their data


def main() -> int:
    """Serve one sweep."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the command handles them, and sends SIGTERM
        signal.signal(number, signal.SIG_IGN)
    sweep, folder, is_dry, parent = pickle.load(sys.stdin.buffer)
    die_with(parent)
    work_here()
    answer = _typos_of(sweep)
    if not answer:
        _import_all()
        answer = _checked_in_forks(sweep, folder, is_dry)

    print(json.dumps(answer), flush=True)
    # Without a limit: the command answers or ends, which closes the pipe.
    if not sys.stdin.buffer.readline():
        return 0
    return run_workers(Queue(sweep, folder), lambda arguments: run_command("fit", arguments))


def check(
    sweep: Sweep, folder: Path, cells: Sequence[Cell], is_dry: bool = False
) -> dict[str, Any]:
    """Prepare the fits of some cells without running them.

    Experiments with a finished cell are skipped. An error of a source is listed once, not for each
    cell that merges its models.

    Args:
        sweep: The sweep.
        folder: Its folder.
        cells: The cells.
        is_dry: Whether nothing may be downloaded.

    Returns:
        ``workers`` is the largest number of workers of any cell's engine. ``refused`` holds one
        line per experiment that cannot start, with the name of its method, by the cell's folder.
    """
    workers, refused = 1, {}
    ready: dict[Cell, dict[str, Any] | None] = {}  # many cells may have one source
    for cell in cells:
        if any((folder / cell.folder.parent).glob(f"*/{DONE}")):
            continue
        ready[cell] = None
        try:
            of_cell, settings = _make_ready(sweep, cell, is_dry)
            workers, ready[cell] = max(workers, of_cell), settings
            if cell.source is not None:
                if cell.source not in ready and not (folder / cell.source.folder / DONE).is_file():
                    _, ready[cell.source] = _make_ready(sweep, cell.source, is_dry)
                _refuse_other_training(settings, cell.source, folder, ready)
        except FlsuiteError as error:
            refused[str(cell.folder)] = f"{_place(sweep, cell)}: {one_line(error)}"
    return {"workers": workers, "refused": refused}


def _refuse_other_training(
    settings: dict[str, Any], source: Cell, folder: Path, ready: dict[Cell, dict[str, Any] | None]
) -> None:
    """Refuse a cell if its source trains differently, or has ended without keeping its models."""
    from flsuite.runs.fork import DECIDE_TRAINING, trained_updates
    from flsuite.runs.settings import refuse_mismatch

    if (folder / source.folder / DONE).is_file():
        trained_updates(folder / source.folder, settings)
    elif (theirs := ready[source]) is not None:
        refuse_mismatch(settings, theirs, source.folder, DECIDE_TRAINING)


def _make_ready(sweep: Sweep, cell: Cell, is_dry: bool) -> tuple[int, dict[str, Any]]:
    """Prepare a cell up to its first round.

    Returns:
        The number of workers of its engine, and its settings.

    Raises:
        FlsuiteError: If the cell cannot start.
    """
    # Lightning takes a while to import.
    from flsuite.commands.fit import build
    from flsuite.data.module import FederatedDataModule

    gc.collect()  # the last cell's data: its trainer and its run refer to each other
    with tempfile.TemporaryDirectory() as folder:
        arguments = fit_arguments(sweep, cell, Path(folder))
        import_plugins(arguments)
        trainer, model, data = build(arguments)
        if is_dry and isinstance(data, FederatedDataModule):
            data.download = False
        if sweep.together:
            _refuse_alone(trainer)
        run = trainer.prepare(model, data)
    return getattr(trainer.engine, "workers", None) or 1, run.settings


def _refuse_alone(trainer: "FederatedTrainer") -> None:
    """Refuse a cell that cannot train together with those of other seeds in one process.

    Raises:
        FlsuiteError: It says what to change.
    """
    engine = trainer.engine
    if type(engine).__name__ != "Vectorized" or getattr(engine, "workers", 1) > 1:
        raise FlsuiteError(
            f"together joins the stacks of one process, but trainer.engine is {engine}; set it to "
            "Vectorized with one worker for every method, or leave together out"
        )
    for logger in trainer.loggers:
        for base in type(logger).__mro__:
            if (name := base.__name__) in _ONE_A_PROCESS:
                raise FlsuiteError(
                    f"together runs several cells in one process, which has one {name}; choose "
                    "another trainer.logger, or leave together out"
                )


def _typos_of(sweep: Sweep) -> dict[str, Any]:
    """Return an error that lists the misspelled keys and classes of all methods, if any."""
    lines: dict[str, str] = {}
    for cell in samples_of(sweep):
        try:
            refuse_typos("fit", fit_arguments(sweep, cell, Path()))
        except FlsuiteError as error:
            lines = dict.fromkeys(error.args, _place(sweep, cell)) | lines
    if not lines:
        return {}
    return {"error": "; ".join(f"{place}: {line}" for line, place in lines.items())}


def _place(sweep: Sweep, cell: Cell) -> str:
    """Return the name of the method and its settings from the grid and the tuning."""
    usual = {**sweep.shared, **sweep.methods[cell.method], "trainer.keep_updates": True}
    changes = [f"{k} {v}" for k, v in cell.overrides.items() if k not in usual or usual[k] != v]
    return f"method {cell.method}" + (f", {', '.join(changes)}" if changes else "")


def _import_all() -> None:
    """Import what every cell needs, without garbage collection, which would find nothing."""
    gc.disable()
    import torch

    import flsuite.analysis
    import flsuite.commands.fit
    import flsuite.federation.engines.wire  # noqa: F401  (where an engine's workers are forked from)

    torch.set_num_threads(1)  # also for a cell's work outside its engine
    gc.freeze()  # a collection in a fork would copy every shared object
    gc.enable()


def _checked_in_forks(sweep: Sweep, folder: Path, is_dry: bool) -> dict[str, Any]:
    """Run :func:`check` in forks, because what it builds starts threads and processes.

    If there are many samples, several cores check them. Cells that merge the models of one source
    are in one part, because an error of the source is listed once.

    Returns:
        What :func:`check` returns, with the lines of ``refused`` in the order of the samples, or an
        ``error``.
    """
    from flsuite.federation.engines.pool import cores  # late, because the imports take a while

    try:
        require_distinct(sweep)
    except FlsuiteError as error:
        return {"error": one_line(error)}
    samples, by_source = samples_of(sweep), dict[Cell, list[Cell]]()
    for cell in samples:
        by_source.setdefault(cell.source or cell, []).append(cell)
    most = min(cores(), len(samples) // _CELLS_PER_CHECK, _MOST_CHECKS)
    parts: list[list[Cell]] = [[] for _ in range(max(most, 1))]
    for cells in by_source.values():
        min(parts, key=len).extend(cells)

    answers = _answers_of(partial(check, sweep, folder, cells, is_dry) for cells in parts)
    for answer in answers:
        if "error" in answer:
            return answer
    refused = {place: line for answer in answers for place, line in answer["refused"].items()}
    return {
        "workers": max(answer["workers"] for answer in answers),
        "refused": [refused[str(cell.folder)] for cell in samples if str(cell.folder) in refused],
    }


def _answers_of(calls: Iterable[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Run functions in forks at the same time, and return their answers.

    The command limits the wait.
    """
    children = []
    for call in calls:
        read, write = os.pipe()
        children.append((fork(partial(_answer, call, write)), read))
        os.close(write)

    answers = []
    for child, descriptor in children:
        with open(descriptor, encoding="utf-8") as file:
            answer = file.read() or json.dumps({"error": "the check of the methods was killed"})
        os.waitpid(child, 0)
        answers.append(json.loads(answer))
    return answers


def _answer(call: Callable[[], dict[str, Any]], descriptor: int) -> int:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the libraries' messages appear again in every cell's log
        os.dup2(null, stream)
    try:
        answer = call()
    except FlsuiteError as error:
        answer = {"error": one_line(error)}
    except Exception as error:  # from a user's own class
        answer = {"error": f"{type(error).__name__}: {with_place(error)}"}
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    return 0


if __name__ == "__main__":
    os._exit(main())
