"""A list of runs with method, data, progress and scores."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from flsuite.analysis.groups import Variation, find_runs, flatten, monitor_of, partition_of
from flsuite.analysis.runs import read_metrics, run_scores
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import failure_reason, is_locked
from flsuite.runs.record import may_stop_early, reached_a_limit, read_settings

Progress = Literal["finished", "interrupted", "running", "failed", "broken"]

_COLUMNS = ["run", "method", "data", "partition", "seed", "state", "rounds", "of", "score"]
_COLUMNS += ["last", "picked", "modified", "error"]


def list_runs(places: Iterable[str | Path]) -> pd.DataFrame:
    """Return one row per run among and below ``places``.

    Returns:
        The columns are ``run`` (its folder), ``method``, ``data``, ``partition``, ``seed``,
        ``state``, ``rounds`` (done), ``of`` (maximum rounds), ``score`` (the name of its monitor),
        ``last`` and ``picked`` (that score on test data, in the last round and in the round picked
        on validation data), ``modified`` (when its table last grew) and ``error``. The state is
        ``finished``, ``interrupted``, ``running``, ``failed`` or ``broken``. ``error`` says why a
        run of a sweep failed, and which file of a broken run cannot be read.

    Raises:
        FlsuiteError: If there are no runs.
    """
    return pd.DataFrame([_row(folder) for folder in find_runs(places)], columns=_COLUMNS)


def _row(folder: Path) -> dict[str, Any]:
    modified = pd.Timestamp((folder / "metrics.csv").stat().st_mtime, unit="s", tz="UTC")
    row: dict[str, Any] = {"run": folder, "modified": modified, "error": ""}
    try:
        settings = read_settings(folder)
        return row | _described(settings) | _measured(folder, settings)
    except (FlsuiteError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        return row | {"state": "broken", "error": one_line(error, 200)}


def _described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that follow from a run's settings."""
    flat = dict(flatten(settings))
    alone = Variation([flat])
    return {
        "method": alone.algorithm(flat),
        "data": _data_name(settings["data"]),
        "partition": partition_of(flat, alone),
        "seed": settings.get("seed"),
    }


def _data_name(description: Mapping[str, Any]) -> str:
    """Return the name of a dataset: its argument ``name`` if it has one, else its class.

    For data that wraps another data module, return the name of the inner one.
    """
    arguments = description.get("init_args") or {}
    inner = arguments.get("data")
    if isinstance(inner, Mapping) and "class_path" in inner:
        return _data_name(inner)
    return str(arguments.get("name") or description["class_path"].rsplit(".", 1)[-1])


def _measured(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that follow from a run's metrics."""
    table = read_metrics(folder)
    monitor = monitor_of(settings)
    scores = run_scores(table, monitor, monitor, last=1) if len(table) else {}
    state = _state(folder, settings, table)
    return {
        "state": state,
        "error": failure_reason(folder) if state == "failed" else "",
        "rounds": int(table["round"].max()) if len(table) else 0,
        "of": settings.get("rounds"),
        "score": monitor,
        "last": scores.get("last"),
        "picked": scores.get("picked"),
    }


def _state(folder: Path, settings: Mapping[str, Any], table: pd.DataFrame) -> Progress:
    if is_locked(folder):
        return "running"
    if len(table) and has_ended(folder, settings, table):
        return "finished"
    return "failed" if failure_reason(folder) else "interrupted"


def has_ended(folder: Path, settings: Mapping[str, Any], table: pd.DataFrame) -> bool:
    """Return whether a run ended with the last round in its table.

    Either the round reached a limit, or a callback ended the run. The latter is visible from scores
    by class or a picture of the curves, which are only written at the end. An extension that was
    killed at once has them, too, from its earlier end.

    Args:
        folder: The run's folder.
        settings: Its settings, which hold the limits.
        table: Its metrics.
    """
    last = table[table["round"] == table["round"].max()]
    if reached_a_limit(settings, last.iloc[-1].to_dict()):
        return True
    if not may_stop_early(settings):
        return False

    names = last[(last["split"] == "test") & (last["scope"] == "global")]["metric"].astype(str)
    picture, numbers = folder / "curves.png", folder / "metrics.csv"
    is_drawn = picture.is_file() and picture.stat().st_mtime >= numbers.stat().st_mtime
    return bool(names.str.startswith("accuracy/").any()) or is_drawn
