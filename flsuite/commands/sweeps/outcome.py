"""The outcome of a finished cell: its time and its scores."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from flsuite.common.errors import FlsuiteError
from flsuite.common.files import replace_text

DONE = "done.json"
"""The file in a run's folder that marks its cell as done."""


@dataclass(frozen=True)
class CellEnd:
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


def write_outcome(run_dir: Path, outcome: CellEnd) -> None:
    """Mark a cell as done."""
    text = json.dumps(asdict(outcome)) + "\n"
    replace_text(text, run_dir / DONE, flush=True)


def read_outcome(run_dir: Path) -> CellEnd | None:
    """Return the outcome of a cell, or ``None`` if it is not done.

    Raises:
        FlsuiteError: If ``done.json`` is damaged.
    """
    path = run_dir / DONE
    try:
        return CellEnd(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise FlsuiteError(f"{path} is damaged; delete it to run the cell again") from error


def measure(run_dir: Path, seconds: float) -> CellEnd:
    """Read the scores of a finished run.

    Raises:
        FlsuiteError: If a file of the run is damaged.
    """
    # Imported late: pandas and matplotlib are not needed earlier.
    from flsuite.analysis.groups import monitor_of
    from flsuite.analysis.runs import curve, of_last_task, read_metrics
    from flsuite.common.score_names import lower_is_better
    from flsuite.runs.record import read_settings

    monitor = monitor_of(read_settings(run_dir))
    is_lower = bool(lower_is_better(monitor))  # as the run takes it
    table = of_last_task(read_metrics(run_dir))
    test, validation = curve(table, monitor, "test"), curve(table, monitor, "val").dropna()
    if validation.empty:
        return CellEnd(seconds, monitor, is_lower, None, _finite(test.iloc[-1:]))
    # argmin returns the first round on a tie.
    picked = validation.index[int((validation if is_lower else -validation).argmin())]
    scores = _finite(validation[[picked]]), _finite(test[test.index == picked])
    return CellEnd(seconds, monitor, is_lower, *scores)


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
