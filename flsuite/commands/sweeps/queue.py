"""A folder of cells as a queue that any number of processes can work on.

Its entire state is in files. A cell is done when its run's folder has ``done.json``, has failed
when it has ``failed.txt``, and is running while a process holds the lock next to the folder. The
kernel releases the lock when the process dies for any reason.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from flsuite.commands.sweeps.plan import Cell, Search, TuningTrial, cell, label_of, searches
from flsuite.commands.sweeps.reading import Sweep
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import FAILED, escaped, is_locked, locked, make_folder, replace_text
from flsuite.runs.record import TUNING_COLUMNS, read_settings

CellState = Literal["done", "failed", "running", "interrupted", "waiting"]

DONE = "done.json"
"""The file in a run's folder that marks its cell as done."""

_TUNING = 60.0  # maximum seconds until another process has written tuning.csv


@dataclass(frozen=True)
class CellOutcome:
    """Time and scores of a finished cell.

    Attributes:
        seconds: Seconds that the cell took, including all restarts.
        monitor: The score that picks a round.
        lower_is_better: Whether low values of this score are better.
        val: The best value of the score on validation data. ``None`` without validation data.
        test: The value on test data in that round, or in the last round without validation data.
    """

    seconds: float
    monitor: str
    lower_is_better: bool
    val: float | None
    test: float | None


class Queue:
    """The cells of a sweep in its folder.

    Cells that failed before this object was created are retried. Cells that fail later, in any
    process, are not.

    Args:
        sweep: The sweep.
        folder: Its folder.
        retries: Whether failed cells are retried.
    """

    def __init__(self, sweep: Sweep, folder: Path, retries: bool = True) -> None:
        self.sweep = sweep
        self.folder = folder
        self.searches = searches(sweep)
        self._outcomes: dict[Cell, CellOutcome] = {}
        self._results: dict[Search, list[Cell]] = {}
        self._failed_before: dict[Cell, int] = {}
        if retries:
            self._failed_before = {c: stamp for c in self.known() if (stamp := self._failure(c))}

    def known(self) -> list[Cell]:
        """Return all trials, and the results of finished searches."""
        trials = [cell for search in self.searches for cell in search.cells]
        known = [results for s in self.searches if (results := self.results(s)) is not None]
        # Ordered by seed first, so that early results compare all methods.
        return trials + [cell for same_seed in zip(*known, strict=True) for cell in same_seed]

    def results(self, search: Search) -> list[Cell] | None:
        """Return the results of a search, one per seed, or ``None`` until its values are known."""
        if search in self._results:
            return self._results[search]
        if not self._is_over(search):
            return None
        best = self.best(search)
        if search.trials and best is None:
            return None
        tuned = best.values if best else {}
        results = [
            cell(self.sweep, search.method, tuned, search.point, seed, is_trial=False)
            for seed in self.sweep.seeds
        ]
        # A failed trial may still succeed in another start and be chosen.
        if all(self.outcome(trial) for trial in search.cells):
            self._results[search] = results
        return results

    def best(self, search: Search) -> TuningTrial | None:
        """Return the trial with the best score, the first on a tie, or ``None`` without scores."""
        scores = {t: score for t in search.trials if (score := self.score(t)) is not None}
        outcomes = filter(None, map(self.outcome, search.cells))
        sign = -1 if any(outcome.lower_is_better for outcome in outcomes) else 1
        return max(scores, key=lambda trial: sign * scores[trial], default=None)

    def score(self, trial: TuningTrial) -> float | None:
        """Return the mean of the validation scores, or ``None`` unless every seed has one."""
        outcomes = [self.outcome(cell) for cell in trial.cells]
        scores = [o.val for o in outcomes if o is not None and o.val is not None]
        return sum(scores) / len(scores) if len(scores) == len(outcomes) else None

    def without_winner(self) -> list[Search]:
        """Return the finished searches without results, because no trial has a score."""
        return [s for s in self.searches if self._is_over(s) and self.results(s) is None]

    @property
    def size(self) -> int:
        """Return the number of cells, including results whose values are not known yet."""
        trials = sum(len(search.cells) for search in self.searches)
        return trials + len(self.searches) * len(self.sweep.seeds)

    def outcome(self, cell: Cell) -> CellOutcome | None:
        """Return the outcome of a cell, or ``None`` if it is not done.

        Raises:
            FlsuiteError: If ``done.json`` is damaged.
        """
        path = self.run_dir(cell) / DONE
        if cell not in self._outcomes:
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                self._outcomes[cell] = CellOutcome(**content)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (ValueError, TypeError) as error:
                raise FlsuiteError(f"{path} is damaged; delete it to run the cell again") from error
        return self._outcomes[cell]

    def has_ended(self, cell: Cell) -> bool:
        """Return whether a cell is done or has failed since this object was created."""
        if self.outcome(cell):
            return True
        return self._failure(cell) not in (None, self._failed_before.get(cell))

    @property
    def ended(self) -> int:
        """Return the number of ended cells, including results whose trials all failed."""
        without = len(self.without_winner()) * len(self.sweep.seeds)
        return without + sum(self.has_ended(cell) for cell in self.known())

    def state(self, cell: Cell) -> CellState:
        """Return the state of a cell."""
        if self.outcome(cell):
            return "done"
        if is_locked(self._lock(cell)):
            return "running"
        if self._failure(cell):
            return "failed"
        has_begun = (self.run_dir(cell) / "metrics.csv").is_file()
        return "interrupted" if has_begun else "waiting"

    def counts(self) -> "Counter[CellState]":
        """Return the number of cells per state. Results with unknown values are waiting."""
        states: Counter[CellState] = Counter(self.state(cell) for cell in self.known())
        states["failed"] += len(self.without_winner()) * len(self.sweep.seeds)
        states["waiting"] += self.size - states.total()
        return states

    def is_complete(self) -> bool:
        """Return whether all cells are done."""
        return self.counts()["done"] == self.size

    def run_dir(self, cell: Cell) -> Path:
        """Return the folder of a cell's run."""
        return self.folder / cell.folder

    # For workers

    @contextmanager
    def claim(self) -> Iterator[Cell | None]:
        """Claim and lock the next free cell, or yield ``None`` if there is none at the moment."""
        for candidate in self._free():
            with _locked(self._lock(candidate)) as is_ours:
                # Another process may have finished it between the check and the lock.
                if is_ours and not self.has_ended(candidate):
                    yield candidate
                    return
        yield None

    @contextmanager
    def claim_seeds(self, cell: Cell | None) -> Iterator[list[Cell]]:
        """Lock the free cells that train together with a claimed one: those of its other seeds.

        Where fewer methods are left than workers, each worker takes a share of the seeds.
        """
        if cell is None or self.sweep.together is None:
            yield []
            return
        free = list(self._free())
        alike = [one for one in free if one.folder.parent == cell.folder.parent]
        shares = max(1, self.sweep.workers // max(1, len({one.folder.parent for one in free})))
        most, others = math.ceil(len(alike) / shares) - 1, list[Cell]()
        with ExitStack() as locks:
            for one in alike:
                if one == cell or len(others) == most:
                    continue
                if locks.enter_context(_locked(self._lock(one))) and not self.has_ended(one):
                    others.append(one)
            yield others

    def _free(self) -> Iterator[Cell]:
        """Yield the cells that may run now, unless another process runs them."""
        for one in self.known():
            if not self.has_ended(one) and (one.source is None or self.has_ended(one.source)):
                yield one

    def is_over_for_now(self) -> bool:
        """Return whether every cell is done, or has failed since this object was created."""
        return all(map(self._is_over, self.searches)) and all(map(self.has_ended, self.known()))

    def begin(self, cell: Cell) -> Path:
        """Create the folder of a claimed cell, and clear an earlier failure."""
        folder = make_folder(self.run_dir(cell))
        (folder / FAILED).unlink(missing_ok=True)
        self._failed_before.pop(cell, None)
        return folder

    def finish(self, cell: Cell, outcome: CellOutcome) -> None:
        """Mark a claimed cell as done."""
        text = json.dumps(asdict(outcome)) + "\n"
        replace_text(text, self.run_dir(cell) / DONE, flush=True)
        if cell.is_trial:
            self.note_tuning()

    def fail(self, cell: Cell, line: str) -> None:
        """Mark a claimed cell as failed, with the reason in one line."""
        replace_text(f"{line}\n", self.run_dir(cell) / FAILED)
        if cell.is_trial:
            self.note_tuning()

    def note_tuning(self) -> None:
        """Write ``tuning.csv``, if there is tuning: each trial, its score and whether it is chosen.

        No trial of a search is chosen until all of them have ended.
        """
        if self.sweep.tuning is None:
            return
        # If it waits in vain, the next cell that ends writes the file.
        with _locked(self.folder / ".tuning.lock", _TUNING) as is_ours:
            if not is_ours:
                return
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(TUNING_COLUMNS)
            for search in self.searches:
                name = escaped(search.method), escaped(label_of(search.point))
                best = self.best(search) if self._is_over(search) else None
                for trial in search.trials:
                    score, values = self.score(trial), json.dumps(trial.values, default=str)
                    shown = "" if score is None else f"{score:.6g}"
                    writer.writerow([*name, trial.number, values, shown, trial is best])
            replace_text(text.getvalue(), self.folder / "tuning.csv")

    def _is_over(self, search: Search) -> bool:
        """Return whether each trial of a search is done or has failed since this start."""
        return all(map(self.has_ended, search.cells))

    def _lock(self, cell: Cell) -> Path:
        # Next to the run's folder, so that a user can delete the folder to run the cell again.
        folder = self.run_dir(cell)
        return folder.with_name(f".{folder.name}.lock")

    def _failure(self, cell: Cell) -> int | None:
        """Return the time stamp of a cell's failure, or ``None`` if it has not failed."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.run_dir(cell) / FAILED).stat().st_mtime_ns
        return None


@contextmanager
def _locked(path: Path, wait: float = 0.0) -> Iterator[bool]:
    """Lock a file of the queue, and yield whether this process got the lock.

    Raises:
        FlsuiteError: If the system or the disk has no locks. Two processes would run one cell.
    """
    make_folder(path.parent)
    with locked(path, wait) as is_ours:
        if is_ours is None:
            raise FlsuiteError(
                f"cannot lock {path}; choose a folder on a disk with flock, such as a local one, "
                "NFSv4 or a parallel file system"
            )
        yield is_ours


def measure(run_dir: Path, seconds: float) -> CellOutcome:
    """Read the scores of a finished run.

    Raises:
        FlsuiteError: If a file of the run is damaged.
    """
    # Imported late: pandas and matplotlib are not needed earlier.
    from flsuite.analysis.groups import monitor_of
    from flsuite.analysis.runs import curve, of_last_task, read_metrics
    from flsuite.common.score_names import lower_is_better

    monitor = monitor_of(read_settings(run_dir))
    is_lower = bool(lower_is_better(monitor))  # as the run takes it
    table = of_last_task(read_metrics(run_dir))
    test, validation = curve(table, monitor, "test"), curve(table, monitor, "val").dropna()
    if validation.empty:
        return CellOutcome(seconds, monitor, is_lower, None, _finite(test.iloc[-1:]))
    # argmin returns the first round on a tie.
    picked = validation.index[int((validation if is_lower else -validation).argmin())]
    scores = _finite(validation[[picked]]), _finite(test[test.index == picked])
    return CellOutcome(seconds, monitor, is_lower, *scores)


def seconds_so_far(run_dir: Path) -> float:
    """Return the seconds that a run has trained, from its table."""
    table = run_dir / "metrics.csv"
    if not table.is_file():
        return 0.0
    # Damaged bytes are ignored here, because the fit reports them.
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        return float(dict(zip(lines[0].split(","), lines[-1].split(","), strict=False))["wall_s"])
    except (IndexError, KeyError, ValueError):  # a kill may leave half a row, or only the header
        return 0.0


def _finite(values: Iterable[float]) -> float | None:
    """Return the last number, or ``None`` if there is none or it is not finite."""
    numbers = [float(value) for value in values]
    return numbers[-1] if numbers and math.isfinite(numbers[-1]) else None
