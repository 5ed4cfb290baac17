"""Facts about a run, read from its folder."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flsuite.common.errors import FlsuiteError
from flsuite.common.files import read_yaml
from flsuite.common.moved import renewed

Row = Mapping[str, str]

LIMITS = {
    "rounds": "round",
    "max_virtual_seconds": "virtual_s",
    "max_client_updates": "client_updates",
}
"""The limits of a run, and the columns of its table that they limit."""
TUNING_COLUMNS = ("method", "grid point", "trial", "values", "score", "chosen")
"""The columns of a sweep's ``tuning.csv``, a row per trial."""
SWEEP = "sweep.json"
"""The file in a sweep's folder with its methods, in the order of the sweep's file."""
_PARTS = ("model", "data", "aggregator", "schedule")  # settings of every run


def read_settings(run: Path) -> dict[str, Any]:
    """Read ``settings.yaml`` of a run: all settings that determine its result.

    Raises:
        FlsuiteError: If the file is missing or does not belong to a run.
    """
    path = run / "settings.yaml"
    if not path.is_file():
        raise FlsuiteError(
            f"{run} has no settings.yaml: it is not the folder of a run; name another one"
        )
    content = read_yaml(path)
    parts = [content.get(name) for name in _PARTS] if isinstance(content, dict) else [None]
    if not all(map(_is_object, parts)) or not _is_seed(content.get("seed")):
        raise FlsuiteError(
            f"{path} does not hold the settings of a run; restore it or leave it out"
        )
    return {str(name): renewed(value) for name, value in content.items()}


def read_sweep_record(folder: Path) -> dict[str, Any]:
    """Read what a sweep notes in its folder: its ``methods``. It is empty outside of sweeps.

    Raises:
        FlsuiteError: If the file is damaged.
    """
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {**content, "methods": list(content["methods"])}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError) as error:
        raise FlsuiteError(f"{path} is damaged; the sweep's command writes it again") from error


def _is_object(value: object) -> bool:
    """Return whether a setting describes an object. The file may be cut off."""
    if not isinstance(value, dict) or not isinstance(value.get("init_args"), dict):
        return False
    return isinstance(value.get("class_path"), str)


def _is_seed(value: object) -> bool:
    return value is None or (isinstance(value, int) and abs(value) < 1 << 63)


def first_round(settings: Mapping[str, Any]) -> int:
    """Return the first round of a run, from its settings. Earlier ones are its parent's."""
    return int((settings.get("fork") or {"round": 0})["round"]) + 1


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


def may_stop_early(settings: Mapping[str, Any]) -> bool:
    """Return whether a callback may end a run, from its settings. Without limits, one has to."""
    has_limit = any(settings.get(name) is not None for name in LIMITS)
    return bool(settings.get("stopping") or settings.get("callbacks")) or not has_limit


def reached_a_limit(settings: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether a run had reached one of its limits at a row of its ``metrics.csv``."""
    limits = ((column, settings.get(name)) for name, column in LIMITS.items())
    return any(limit is not None and float(row[column]) >= limit for column, limit in limits)


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


def memories_of(federation: Mapping[str, Any]) -> set[str]:
    """Return the files of a run that the state of its federation refers to."""
    clients = {f"clients/round-{round:06d}.pt" for round in federation["clients"].values()}
    return clients | {f"in_flight/version-{n:06d}.pt" for n in versions_in_flight(federation)}


def versions_in_flight(federation: Mapping[str, Any]) -> set[int]:
    """Return the versions that clients in flight had started from."""
    schedule = federation["schedule"] or {}
    fits = schedule.get("schedule", schedule).get("in_flight", [])  # Faults wraps another one
    return {fit["version"] for fit in fits if fit["outcome"] == "arrived"}


def kept_rounds(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their round, also ``last.ckpt`` and ``best.ckpt``."""
    return {round_of(path): path for path in checkpoints_of(run)}


def checkpoints_of(run: Path) -> list[Path]:
    """Return all checkpoints of a run."""
    folder = run / "checkpoints"
    return [
        *sorted(path for path in folder.glob("round-*.ckpt") if path.stem[6:].isdecimal()),
        *(path for name in ("best", "last") if (path := folder / f"{name}.ckpt").is_file()),
    ]


def kept_on_disk(run: Path) -> tuple[int, int]:
    """Return the number of rounds that a run keeps for forks, and their bytes on disk.

    Checkpoints and clients' memories that several rounds share are counted once.
    """
    checkpoints = [path for path in checkpoints_of(run) if path.stem.startswith("round-")]
    files = [*checkpoints, *run.glob("clients/*.pt"), *run.glob("in_flight/*.pt")]
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in (path.stat() for path in files)}
    return len(checkpoints), sum(sizes.values())


def round_of(path: Path) -> int:
    """Return the round of a checkpoint."""
    if path.stem.startswith("round-"):
        return int(path.stem.removeprefix("round-"))
    from flsuite.runs.checkpoint import load_own_parts  # imported late: it needs torch

    return int(load_own_parts(path)["federation"]["clock"]["round"])


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a table, if it exists.

    Raises:
        FlsuiteError: If it is not text, or a cell is endless.
    """
    if path.is_file():
        try:
            yield from csv.DictReader(_text(path).splitlines())
        except csv.Error as error:
            raise FlsuiteError(f"{path} is damaged ({error}); restore it") from error


def table_fault(run: Path) -> str | None:
    """Return which table of a run is missing, damaged or cut off, or ``None``."""
    for name in ("metrics.csv", "timeline.csv"):
        if not (run / name).is_file():
            return f"{name} is missing"
        text = _text(run / name)
        rows = csv.DictReader(text.splitlines())
        try:
            is_cut_off = any(None in row.values() for row in rows) or not text.endswith("\n")
        except csv.Error as error:
            return f"{name} is damaged ({error})"
        if is_cut_off:
            return f"{name}, line {rows.line_num} is cut off"
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FlsuiteError(f"{path} is damaged at byte {error.start}; restore it") from error


def round_of_row(path: Path, row: Row) -> int:
    """Return the round of a row.

    Raises:
        FlsuiteError: If it is not a number of at least 1.
    """
    if not str(row["round"]).isdecimal() or int(row["round"]) < 1:
        raise FlsuiteError(f"{path} has a row of round {row['round']!r}; restore the file")
    return int(row["round"])
