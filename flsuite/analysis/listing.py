"""A list of runs with method, data, progress and scores, and notes on runs that do not compare."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from flsuite.analysis.groups import (
    Group,
    Variation,
    find_runs,
    flatten,
    monitor_of,
    partition_of,
    tables_of,
)
from flsuite.analysis.panels import aligned
from flsuite.analysis.runs import curve, read_metrics, run_scores
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
    match arguments:
        case {"data": {"class_path": _} as inner}:
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


_MOST_LINES = 5  # runs that are named one by one


def finished(groups: Sequence[Group]) -> tuple[Sequence[Group], list[str]]:
    """Return the groups without unfinished runs, and a line on the runs that are left out.

    If no run is finished, all are kept.
    """
    ended: list[Group] = []
    for group in groups:
        runs = {f: t for f, t in group.runs.items() if has_ended(f, read_settings(f), t)}
        ended += [replace(group, runs=runs)] if runs else []
    kept = {folder for group in ended for folder in group.runs}
    left = {f: t for group in groups for f, t in group.runs.items() if f not in kept}
    if not ended or not left:
        return groups, []
    folder, table = next(iter(left.items()))
    runs_are = "1 run is" if len(left) == 1 else f"{len(left)} runs are"
    end = f"{folder} ends with round {int(table['round'].max())}{_why(folder)}"
    return ended, [f"{runs_are} not finished and left out: {'such as ' * (len(left) > 1)}{end}"]


def uneven(groups: Sequence[Group]) -> list[str]:
    """Return a line for each run that ended before the others, or one line for many of them.

    Such runs are not comparable with the others, unless all have spent the same budget of client
    updates or virtual seconds, because rounds may differ in size.
    """
    if _share_budget(groups, "max_client_updates", "client_updates") or _share_budget(
        groups, "max_virtual_seconds", "virtual_s"
    ):
        return []
    ends = {
        folder: int(table["round"].max())
        for group in groups
        for folder, table in group.runs.items()
    }
    most = max(ends.values())
    early = {folder: end for folder, end in ends.items() if end < most}
    if len(early) > _MOST_LINES:
        low, high = min(early.values()), max(early.values())
        last = f"round {low}" if low == high else f"rounds {low} to {high}"
        return [f"{len(early)} of {len(ends)} runs end with {last} of {most}"]
    return [
        f"{folder} ends with round {end} of {most}{_why(folder)}" for folder, end in early.items()
    ]


def _why(folder: Path) -> str:
    """Return why a run of a sweep failed, if it did."""
    reason = failure_reason(folder)
    return f" ({reason})" if reason else ""


def _share_budget(groups: Sequence[Group], setting: str, column: str) -> bool:
    """Return whether all runs have the same limit and reached it."""
    limit = groups[0].settings.get(setting)
    is_common = limit is not None and all(g.settings.get(setting) == limit for g in groups)
    ends = [table[column].max() for table in tables_of(groups)]
    return is_common and min(ends) >= limit


def own_models(groups: Sequence[Group], metrics: Sequence[str], split: str) -> set[tuple[str, str]]:
    """Return the groups, by label, and scores of many models, if others have one global model."""
    marked: set[tuple[str, str]] = set()
    for metric in metrics:
        own = {(g.label, metric) for g in groups if _has_score(g, f"{metric}_worst", split)}
        marked |= own if len(own) < len(groups) else set()
    return marked


def own_models_notes(
    groups: Sequence[Group], marked: set[tuple[str, str]], split: str
) -> list[str]:
    """Return a line per score of :func:`own_models`."""
    lines = []
    for metric in sorted({metric for _, metric in marked}):
        names = dict.fromkeys(group.method for group in groups if (group.label, metric) in marked)
        lines.append(
            f"* {metric} of {', '.join(names)} is the mean over the clients' own models, each "
            f"on the whole {split} split; --metric {metric}_client_mean scores the models of "
            f"all methods on each client's own {split} samples"
        )
    return lines


def undefined(groups: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    """Return a line per group and score that some runs do not have in their last round."""
    lines = []
    for group in groups:
        for metric in metrics:
            scores = [run_scores(table, metric, group.monitor, 1) for table in group.runs.values()]
            last = [row["last"] for row in scores if row]
            if without := sum(map(math.isnan, last)):
                lines.append(
                    f"{group.label}: test {metric} is undefined in the last round of {without} of "
                    f"{len(last)} runs, so its mean is, too; pairs of methods leave such runs out"
                )
    return lines


def measured(groups: Sequence[Group], x: str) -> list[str]:
    """Return a line for each group whose virtual seconds cannot be compared."""
    if x != "virtual_s":
        return []
    return [
        f"{group.label}: its virtual seconds were measured on the machine; compare it with others "
        "of the same trainer.schedule.speeds"
        for group in groups
        if _is_measured(group)
    ]


def _is_measured(group: Group) -> bool:
    settings = group.settings
    key = "schedule.schedule" if "schedule.schedule" in settings else "schedule"  # in Faults
    schedule, speeds = str(settings.get(key, "")), settings.get(f"{key}.speeds")
    # Without speeds, a synchronous round takes its measured time.
    return (speeds is None and schedule.endswith("Synchronous")) or str(speeds).endswith("Measured")


def apart(groups: Sequence[Group], metric: str, split: str, x: str) -> list[str]:
    """Return a line for each group without a curve in the picture, or one line for many of them.

    Such runs lack the score, for example an attack's success in runs with another attack, or share
    no part of the axis.
    """
    scored = [group for group in groups if _has_score(group, metric, split)]
    without = [group for group in groups if not _has_score(group, metric, split)]
    if len(without) > _MOST_LINES:
        lines = [f"{len(without)} of {len(groups)} rows have no {split} {metric} and no curve"]
    else:
        lines = [f"{g.label}: its runs have no {split} {metric}; it is not drawn" for g in without]
    return lines + [
        f"{group.label}: its runs have no {x} of {split} {metric} in common; it is not drawn"
        for group in scored
        if not _have_common_points(group, metric, split, x)
    ]


def _have_common_points(group: Group, metric: str, split: str, x: str) -> bool:
    curves = {folder: curve(table, metric, split, x) for folder, table in group.runs.items()}
    return not aligned(curves, x).empty


def _has_score(group: Group, metric: str, split: str) -> bool:
    return any(len(curve(table, metric, split)) for table in group.runs.values())


def repeated(groups: Sequence[Group]) -> list[str]:
    """Return a line for each group in which a seed appears more than once."""
    lines = []
    for group in groups:
        seeds = [seed for seed in group.seeds.values() if seed is not None]
        if twice := sorted({str(seed) for seed in seeds if seeds.count(seed) > 1}):
            which = ", ".join(twice)
            lines.append(f"{group.label}: seed {which} more than once; the spread is too small")
    return lines
