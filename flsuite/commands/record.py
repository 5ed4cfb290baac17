"""Facts about a run, read from its folder."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from flsuite.errors import FlsuiteError
from flsuite.runs.fork import first_round, may_stop_early, reached_a_limit, read_settings

Row = Mapping[str, str]


def start_round(run: Path) -> int:
    """Return the round after which a run begins: 0, or the round of its fork."""
    return first_round(read_settings(run)) - 1


def last_round(run: Path) -> int:
    """Return the last round in a run's table.

    Raises:
        FlsuiteError: If the table has no rows.
    """
    path = run / "metrics.csv"
    rounds = [round_of_row(path, row) for row in rows_of(path)]
    if not rounds:
        raise FlsuiteError(f"{run} has no finished round in its metrics.csv")
    return max(rounds)


def ends(run: Path) -> list[int]:
    """Return the rounds that a run has ended with. One that was extended has several."""
    from flsuite.runs.checkpoint import load_checkpoint  # imported late: it needs torch

    last = run / "checkpoints" / "last.ckpt"
    return list(load_checkpoint(last)["summary"].get("ends", ())) if last.is_file() else []


def is_finished(run: Path) -> bool:
    """Return whether a run has reached its end, instead of being killed before it."""
    path, settings, last = run / "metrics.csv", read_settings(run), last_round(run)
    row = next(row for row in rows_of(path) if round_of_row(path, row) == last)
    if reached_a_limit(settings, row):
        return True
    return may_stop_early(settings) and last in ends(run)


def is_virtual(run: Path) -> bool:
    """Return whether the times of a run come from a virtual clock instead of measurements."""
    schedule = read_settings(run)["schedule"]
    while "schedule" in schedule.get("init_args", {}):  # Faults wraps another one
        schedule = schedule["init_args"]["schedule"]
    speeds = schedule.get("init_args", {}).get("speeds")
    if speeds is None:
        return is_asynchronous(run)  # whose default is a virtual clock
    return not str(speeds.get("class_path", "")).endswith("Measured")


def is_asynchronous(run: Path) -> bool:
    """Return whether a run has no rounds."""
    return "Asynchronous" in str(read_settings(run)["schedule"])


def environment_differences(run: Path) -> list[str]:
    """Return the versions, threads and kind of CPU that differ from the record."""
    from flsuite.runs.folder import versions  # imported late: it needs torch

    path = run / "versions.txt"
    then = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    now = versions().splitlines()
    before = {line.split(" ", 1)[0]: line for line in then}
    return [
        f"{before.get(name, f'{name} unknown')} there, {line.split(' ', 1)[1]} here"
        for line in now
        if (name := line.split(" ", 1)[0]) != "platform" and before.get(name) != line
    ]


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a table, if it exists.

    Raises:
        FlsuiteError: If it is not text.
    """
    if path.is_file():
        yield from csv.DictReader(_text(path).splitlines())


def table_fault(run: Path) -> str | None:
    """Return which table of a run is missing or cut off, or ``None``."""
    for name in ("metrics.csv", "timeline.csv"):
        if not (run / name).is_file():
            return f"{name} is missing"
        if line := _cut_off(run / name):
            return f"{name}, line {line} is cut off"
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FlsuiteError(f"{path} is damaged at byte {error.start}; restore it") from error


def _cut_off(path: Path) -> int | None:
    """Return the number of the first incomplete line of a table, or ``None`` without one."""
    text = _text(path)
    rows = csv.DictReader(text.splitlines())
    for row in rows:
        if None in row.values():
            return rows.line_num
    return None if text.endswith("\n") else rows.line_num


def round_of_row(path: Path, row: Row) -> int:
    """Return the round of a row.

    Raises:
        FlsuiteError: If it is not a number of at least 1.
    """
    if not str(row["round"]).isdecimal() or int(row["round"]) < 1:
        raise FlsuiteError(f"{path} has a row of round {row['round']!r}; restore the file")
    return int(row["round"])
