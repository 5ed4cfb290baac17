"""A sweep's state as tables and lines: the grid, failures, and the time left."""

import time
from datetime import timedelta
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flsuite.commands.sweeps.plan import Cell
from flsuite.commands.sweeps.queue import CellOutcome, CellState, Queue
from flsuite.common.files import failure_reason
from flsuite.common.score_names import shown_number, text_table

_UNDONE: tuple[CellState, ...] = ("running", "failed", "interrupted", "waiting")


def print_status(queue: Queue) -> None:
    """Print the grid with each cell's score or state."""
    headings = ["method", *(f"seed {seed}" for seed in queue.sweep.seeds)]
    table = text_table(f"{queue.folder}", headings, (), caption=_caption(queue))
    failed = queue.without_winner()
    for search in queue.searches:
        unknown = ["failed" if search in failed else "waiting"] * len(queue.sweep.seeds)
        results = queue.results(search)
        shown = unknown if results is None else (_cell_text(queue, cell) for cell in results)
        table.add_row(search.name, *shown)

    _print(table, queue)
    for line in (*failures(queue), *strangers(queue)):
        print(line)


def _caption(queue: Queue) -> str | None:
    """Return what the scores in the grid are. Personal methods may have another one."""
    methods: dict[str, dict[str, None]] = {}
    for cell in queue.known():
        if not cell.is_trial and (outcome := queue.outcome(cell)):
            methods.setdefault(outcome.monitor, {})[cell.method] = None
    scores = [f"{monitor} of {', '.join(names)}" for monitor, names in methods.items()]
    if len(methods) == 1:
        scores = list(methods)
    return f"test {'; '.join(scores)}, in the round picked on validation data" if scores else None


def print_cells(queue: Queue) -> None:
    """Print the cells and the estimated time."""
    rows = [(str(cell.folder), queue.state(cell)) for cell in queue.known()]
    table = text_table(f"{queue.folder}", ("run", "state"), rows, words=2)
    unknown = queue.size - len(queue.known())
    if unknown:
        table.add_row(f"{unknown} results, with values that the tuning chooses", "waiting")
    _print(table, queue)


def _print(table: Table, queue: Queue) -> None:
    """Print a table, the number of cells per state, and the time left."""
    counts = queue.counts()
    undone = [f"{counts[state]} {state}" for state in _UNDONE if counts[state]]
    Console().print(table)
    print(", ".join([f"{counts['done']} of {queue.size} cells are done", *undone]))
    print(estimate(queue))


def estimate(queue: Queue) -> str:
    """Return the estimated time for the remaining cells, as a sentence."""
    left = _seconds_left(queue)
    if left is None:
        return (
            "time left: not known before the first cell is done; start the sweep, then use "
            "--status again"
        )
    workers = queue.sweep.workers
    return f"time left: about {timedelta(seconds=round(left))} with {workers} at the same time"


def failures(queue: Queue) -> list[str]:
    """Return a line per failed cell, and per search without a scored trial."""
    lines = [
        f"failed: {_run_name(cell)}: {failure_reason(queue.run_dir(cell))}"
        for cell in queue.known()
        if queue.state(cell) == "failed"
    ]
    return lines + [
        f"failed: {search.name}: none of its trials has a score"
        for search in queue.without_winner()
    ]


def strangers(queue: Queue) -> list[str]:
    """Return a line about runs in the folder that do not belong to this sweep, if any."""
    if len(queue.known()) < queue.size:  # the folders of its results are not all known yet
        return []
    results = {queue.run_dir(cell) for cell in queue.known() if not cell.is_trial}
    tables = [*queue.folder.glob("*/metrics.csv"), *queue.folder.glob("*/seed-*/metrics.csv")]
    runs = {table.parent for table in tables}
    others = sorted(runs - results)
    if not others:
        return []
    return [
        f"{len(others)} runs in the folder do not belong to the sweep in its current form, but "
        f"count in a report, such as {others[0]}; move their folders away to leave them out"
    ]


class SweepProgress:
    """Shows how many cells have ended (done or failed), and the time left.

    Without a terminal, it prints a line per ended cell.

    Args:
        queue: The cells.
    """

    _INTERVAL = 1.0  # minimum seconds between two reads of the files

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._finished = {cell for cell in queue.known() if queue.has_ended(cell)}
        self._next = 0.0
        columns = (
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("cells", total=queue.size, note="")

    def __enter__(self) -> "SweepProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.look(is_last=True)
        self._bar.stop()

    def look(self, is_last: bool = False) -> None:
        """Read the state of the cells, and show the changes."""
        started = time.monotonic()
        if not is_last and started < self._next:
            return
        counts, ended = self._queue.counts(), self._queue.ended
        self._print_finished(ended)
        notes = [f"{counts['running']} running"]
        notes += [f"{counts['failed']} failed"] if counts["failed"] else []
        if (left := _seconds_left(self._queue)) is not None:
            notes.append(f"{timedelta(seconds=round(left))} left")
        self._bar.update(self._task, completed=ended, note=", ".join(notes))
        # Reading thousands of cells takes long, and the cells need the cores.
        now = time.monotonic()
        self._next = now + max(self._INTERVAL, 20 * (now - started))

    def _print_finished(self, ended: int) -> None:
        queue = self._queue
        known = (cell for cell in queue.known() if cell not in self._finished)
        new = [cell for cell in known if queue.has_ended(cell)]
        self._finished.update(new)
        for number, cell in enumerate(new, start=ended - len(new) + 1):
            outcome = queue.outcome(cell)
            result = f"failed: {failure_reason(queue.run_dir(cell))}"
            if outcome:
                result = _outcome_text(outcome, cell)
            line = f"{number}/{queue.size}  {_run_name(cell)}: {result}"
            self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)


def _seconds_left(queue: Queue) -> float | None:
    """Return the seconds until all cells have ended, or ``None`` before the first one is done.

    The estimate for a cell is the mean time of its method, or of all cells.
    """
    seconds: dict[str, list[float]] = {}
    for cell in queue.known():
        if outcome := queue.outcome(cell):
            seconds.setdefault(cell.method, []).append(outcome.seconds)
    if not seconds:
        return None
    overall = fmean(second for times in seconds.values() for second in times)

    left = 0.0
    for search in queue.searches:
        cells = search.cells + (queue.results(search) or [])
        number = len(search.cells) + len(queue.sweep.seeds) - sum(map(queue.has_ended, cells))
        times = seconds.get(search.method)
        left += number * (fmean(times) if times else overall)
    return left / queue.sweep.workers


def _run_name(cell: Cell) -> str:
    return f"{'trial of ' * cell.is_trial}{cell.name} seed {cell.seed}"


def _cell_text(queue: Queue, cell: Cell) -> str:
    outcome = queue.outcome(cell)
    if outcome is None:
        return queue.state(cell)
    return "done" if outcome.test is None else shown_number(outcome.test)


def _outcome_text(outcome: CellOutcome, cell: Cell) -> str:
    # Test scores of trials are hidden on purpose.
    split, score = ("val", outcome.val) if cell.is_trial else ("test", outcome.test)
    shown = "" if score is None else f", {split} {outcome.monitor} {shown_number(score)}"
    return f"{outcome.seconds:.1f} s{shown}"
