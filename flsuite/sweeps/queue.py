"""A folder of cells as a queue, which any number of processes work on.

All of its state is files. A cell is done when its run's folder has ``done.json``, has failed when
it has ``failed.txt``, and is running while a process holds the lock beside the folder. The kernel
frees a lock when its process dies, whatever it dies of.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from flsuite.errors import FlsuiteError
from flsuite.files import make_folder, replace_file
from flsuite.sweeps.outcome import Outcome, read_outcome, write_outcome
from flsuite.sweeps.plan import Cell, cell
from flsuite.sweeps.reading import Sweep
from flsuite.sweeps.tuning import Contest, contests, write_tuning

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FAILED = "failed.txt"

CellState = Literal["done", "failed", "running", "waiting"]


class Queue:
    """The cells of a sweep in its folder.

    A cell that had failed before this object was made is tried again. One that fails later is not,
    whichever process it fails in.

    Args:
        sweep: The sweep.
        folder: Its folder.
        retries: Whether cells that have failed are to be tried again.
    """

    def __init__(self, sweep: Sweep, folder: Path, retries: bool = True) -> None:
        self.sweep = sweep
        self.folder = folder
        self.contests = contests(sweep)
        self._outcomes: dict[Cell, Outcome] = {}
        self._results: dict[Contest, list[Cell]] = {}
        self._failed_before: dict[Cell, int] = {}
        if retries:
            self._failed_before = {c: stamp for c in self.known() if (stamp := self._failure(c))}

    def known(self) -> list[Cell]:
        """Return all trials, and the results of the contests that are over."""
        trials = [cell for contest in self.contests for cell in contest.cells]
        found = [results for c in self.contests if (results := self.results(c)) is not None]
        # By seeds first: early results then compare all methods.
        return trials + [cell for same_seed in zip(*found, strict=True) for cell in same_seed]

    def results(self, contest: Contest) -> list[Cell] | None:
        """Return a contest's results, one per seed, or ``None`` before its values are known."""
        if contest in self._results:
            return self._results[contest]
        if not self.is_over(contest):
            return None
        best = contest.best(self.outcome)
        if contest.trials and best is None:
            return None
        tuned = best.values if best else {}
        results = [
            cell(self.sweep, contest.method, tuned, contest.point, seed, is_trial=False)
            for seed in self.sweep.seeds
        ]
        # A failed trial may still succeed, in another start, and be chosen.
        if all(self.outcome(trial) for trial in contest.cells):
            self._results[contest] = results
        return results

    def is_over(self, contest: Contest) -> bool:
        """Return whether each trial of a contest is done, or has failed since this start."""
        return all(self.has_ended(c) for c in contest.cells)

    def without_winner(self) -> list[Contest]:
        """Return the contests in which no trial has a score, so that they have no results."""
        return [c for c in self.contests if self.is_over(c) and self.results(c) is None]

    @property
    def size(self) -> int:
        """Return the number of cells, including results whose values are not known yet."""
        trials = sum(len(contest.cells) for contest in self.contests)
        return trials + len(self.contests) * len(self.sweep.seeds)

    def outcome(self, cell: Cell) -> Outcome | None:
        """Return the outcome of a cell, or ``None`` if it is not done."""
        if cell not in self._outcomes and (found := read_outcome(self.run_dir(cell))):
            self._outcomes[cell] = found
        return self._outcomes.get(cell)

    def has_ended(self, cell: Cell) -> bool:
        """Return whether a cell is done, or has failed since this object was made."""
        if self.outcome(cell):
            return True
        return self._failure(cell) not in (None, self._failed_before.get(cell))

    @property
    def ended(self) -> int:
        """Return the number of cells that have ended, with results that no trial leads to."""
        without = len(self.without_winner()) * len(self.sweep.seeds)
        return without + sum(self.has_ended(cell) for cell in self.known())

    def state(self, cell: Cell) -> CellState:
        """Return the state of a cell."""
        if self.outcome(cell):
            return "done"
        if self._is_locked(cell):
            return "running"
        return "failed" if self._failure(cell) else "waiting"

    def counts(self) -> "Counter[CellState]":
        """Return the number of cells in each state. A result whose values are open waits."""
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

    # For those who run the cells

    @contextmanager
    def claim(self) -> Iterator[Cell | None]:
        """Take the next cell that nobody works on, and keep others from it.

        It is ``None`` if there is no such cell at the moment.
        """
        for candidate in self.known():
            if self.has_ended(candidate):
                continue
            with locked(self._lock(candidate)) as is_ours:
                # Another process may have finished it between the check and the lock.
                if is_ours and not self.has_ended(candidate):
                    yield candidate
                    return
        yield None

    def is_over_for_now(self) -> bool:
        """Return whether nothing is left that this start may run."""
        return all(self.is_over(contest) for contest in self.contests) and all(
            self.has_ended(cell) for cell in self.known()
        )

    def begin(self, cell: Cell) -> Path:
        """Make the folder of a claimed cell, and forget an earlier failure."""
        folder = make_folder(self.run_dir(cell))
        (folder / _FAILED).unlink(missing_ok=True)
        self._failed_before.pop(cell, None)
        return folder

    def finish(self, cell: Cell, outcome: Outcome) -> None:
        """Mark a claimed cell as done."""
        write_outcome(self.run_dir(cell), outcome)
        if cell.is_trial:
            self.note_tuning()

    def fail(self, cell: Cell, line: str) -> None:
        """Mark a claimed cell as failed, with one line that says why."""
        path = self.run_dir(cell) / _FAILED
        replace_file(lambda temporary: temporary.write_text(f"{line}\n"), path)
        if cell.is_trial:
            self.note_tuning()

    def reason(self, cell: Cell) -> str:
        """Return the line that says why a cell failed."""
        try:
            return (self.run_dir(cell) / _FAILED).read_text().strip()
        except OSError:  # another process tries it again
            return ""

    def note_tuning(self) -> None:
        """Write ``tuning.csv`` as it is now, if there is tuning."""
        if self.sweep.tuning is not None:
            with locked(self.folder / ".tuning.lock", wait=True):
                path = self.folder / "tuning.csv"
                write_tuning(path, self.contests, self.outcome, self.is_over)

    def _lock(self, cell: Cell) -> Path:
        # Beside the run's folder, so that a user may delete the folder to have it run again.
        folder = self.run_dir(cell)
        return folder.with_name(f".{folder.name}.lock")

    def _is_locked(self, cell: Cell) -> bool:
        path = self._lock(cell)
        if not path.exists():
            return False
        with locked(path) as is_ours:
            return not is_ours

    def _failure(self, cell: Cell) -> int | None:
        """Return a number that stands for the failure of a cell, or ``None`` if it has not."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.run_dir(cell) / _FAILED).stat().st_mtime_ns
        return None


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file, and yield whether this process got it.

    The lock belongs to the open file, and so to forks of this process too.

    Args:
        path: The file, which is made if it is missing, and stays.
        wait: Wait until no other process holds it.

    Raises:
        FlsuiteError: If the system or the disk has no locks.
    """
    if fcntl is None:
        raise FlsuiteError("a sweep needs flock, which this system does not have")
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise FlsuiteError(
                f"cannot lock {path} ({error.strerror}); name a folder on a disk that has flock, "
                "such as a local one, NFSv4 or a parallel file system"
            ) from error
        yield True
    finally:
        os.close(descriptor)
