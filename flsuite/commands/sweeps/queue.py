"""A folder of cells as a queue that any number of processes can work on.

Its entire state is in files. A cell is done when its run's folder has ``done.json``, has failed
when it has ``failed.txt``, and is running while a process holds the lock next to the folder. The
kernel releases the lock when the process dies for any reason.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from flsuite.commands.sweeps.outcome import CellEnd, read_outcome, write_outcome
from flsuite.commands.sweeps.plan import Cell, cell
from flsuite.commands.sweeps.reading import Sweep
from flsuite.commands.sweeps.tuning import Contest, contests, write_tuning
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import (
    FAILED,
    failure_reason,
    is_locked,
    locked,
    make_folder,
    replace_text,
)

CellState = Literal["done", "failed", "running", "interrupted", "waiting"]

_TUNING = 60.0  # maximum seconds until another process has written tuning.csv


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
        self.contests = contests(sweep)
        self._outcomes: dict[Cell, CellEnd] = {}
        self._results: dict[Contest, list[Cell]] = {}
        self._failed_before: dict[Cell, int] = {}
        if retries:
            self._failed_before = {c: stamp for c in self.known() if (stamp := self._failure(c))}

    def known(self) -> list[Cell]:
        """Return all trials, and the results of finished contests."""
        trials = [cell for contest in self.contests for cell in contest.cells]
        known = [results for c in self.contests if (results := self.results(c)) is not None]
        # Ordered by seed first, so that early results compare all methods.
        return trials + [cell for same_seed in zip(*known, strict=True) for cell in same_seed]

    def results(self, contest: Contest) -> list[Cell] | None:
        """Return a contest's results, one per seed, or ``None`` before its values are known."""
        if contest in self._results:
            return self._results[contest]
        if not self._is_over(contest):
            return None
        best = contest.best(self.outcome)
        if contest.trials and best is None:
            return None
        tuned = best.values if best else {}
        results = [
            cell(self.sweep, contest.method, tuned, contest.point, seed, is_trial=False)
            for seed in self.sweep.seeds
        ]
        # A failed trial may still succeed in another start and be chosen.
        if all(self.outcome(trial) for trial in contest.cells):
            self._results[contest] = results
        return results

    def without_winner(self) -> list[Contest]:
        """Return the finished contests without results, because no trial has a score."""
        return [c for c in self.contests if self._is_over(c) and self.results(c) is None]

    @property
    def size(self) -> int:
        """Return the number of cells, including results whose values are not known yet."""
        trials = sum(len(contest.cells) for contest in self.contests)
        return trials + len(self.contests) * len(self.sweep.seeds)

    def outcome(self, cell: Cell) -> CellEnd | None:
        """Return the outcome of a cell, or ``None`` if it is not done."""
        if cell not in self._outcomes and (outcome := read_outcome(self.run_dir(cell))):
            self._outcomes[cell] = outcome
        return self._outcomes.get(cell)

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
        for candidate in self.known():
            source = candidate.source
            if self.has_ended(candidate) or (source and not self.has_ended(source)):
                continue
            with _locked(self._lock(candidate)) as is_ours:
                # Another process may have finished it between the check and the lock.
                if is_ours and not self.has_ended(candidate):
                    yield candidate
                    return
        yield None

    def is_over_for_now(self) -> bool:
        """Return whether this start has no cells left to run."""
        return all(map(self._is_over, self.contests)) and all(map(self.has_ended, self.known()))

    def begin(self, cell: Cell) -> Path:
        """Create the folder of a claimed cell, and clear an earlier failure."""
        folder = make_folder(self.run_dir(cell))
        (folder / FAILED).unlink(missing_ok=True)
        self._failed_before.pop(cell, None)
        return folder

    def finish(self, cell: Cell, outcome: CellEnd) -> None:
        """Mark a claimed cell as done."""
        write_outcome(self.run_dir(cell), outcome)
        if cell.is_trial:
            self.note_tuning()

    def fail(self, cell: Cell, line: str) -> None:
        """Mark a claimed cell as failed, with the reason in one line."""
        replace_text(f"{line}\n", self.run_dir(cell) / FAILED)
        if cell.is_trial:
            self.note_tuning()

    def reason(self, cell: Cell) -> str:
        """Return the reason why a cell failed."""
        return failure_reason(self.run_dir(cell))

    def note_tuning(self) -> None:
        """Write the current ``tuning.csv``, if there is tuning."""
        if self.sweep.tuning is not None:
            # If it waits in vain, the next cell that ends writes the file.
            with _locked(self.folder / ".tuning.lock", _TUNING) as is_ours:
                if not is_ours:
                    return
                path = self.folder / "tuning.csv"
                write_tuning(path, self.contests, self.outcome, self._is_over)

    def _is_over(self, contest: Contest) -> bool:
        """Return whether each trial of a contest is done or has failed since this start."""
        return all(self.has_ended(c) for c in contest.cells)

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
