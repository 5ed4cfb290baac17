"""Comparison of experiments: a table of the mean and spread over their runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from flsuite.analysis.groups import Group
from flsuite.analysis.runs import curve, logged_scores, of_last_task, run_scores
from flsuite.common.errors import FlsuiteError, likeliest


def default_metrics(groups: Sequence[Group], splits: Sequence[str], most: int) -> list[str]:
    """Return the default scores to compare: the monitors by which the runs pick a round.

    For a single experiment, its other scores are added, up to ``most`` in all. Scores that were not
    logged on all splits are left out.
    """
    monitors = list(dict.fromkeys(group.monitor for group in groups))
    # Where some methods have personal models, the clients' own test data come first.
    monitors.sort(key=lambda name: not name.endswith("_client_mean"))
    tables = [table for group in groups for table in group.runs.values()]
    known = [logged_scores(tables, monitors[0], [split]) for split in splits]
    shared = [name for name in known[0] if all(name in names for names in known)]
    chosen = [name for name in monitors if name in shared] or shared[:1]
    return shared[:most] if len(groups) == 1 and shared else chosen or monitors


def report_table(
    groups: Sequence[Group], metrics: Sequence[str] = ("accuracy",), last: int = 10
) -> pd.DataFrame:
    """Return one row per group and metric, with mean and spread over its runs.

    The columns are ``group, metric, runs, averaged``, then mean and spread of each score of
    :func:`run_scores`. The spread is the standard deviation with ddof 1, empty for a single run.

    Args:
        groups: The experiments.
        metrics: Names of test scores.
        last: Number of evaluations in ``mean_last``. A shorter run lowers it for all. ``averaged``
            is the number used.

    Raises:
        FlsuiteError: If no run has one of the metrics.
    """
    rows: list[dict[str, Any]] = []
    for metric in metrics:
        require_score(groups, metric, "test")
        averaged = averaged_scores(groups, metric, last)
        rows += [row for group in groups if (row := group_row(group, metric, averaged))]
    return pd.DataFrame(rows)


def averaged_scores(groups: Sequence[Group], metric: str, last: int) -> int:
    """Return the number of last test scores that all runs have, at most ``last``.

    Means over this number of scores are comparable. Runs without the score do not count.
    """
    tables = [of_last_task(table) for group in groups for table in group.runs.values()]
    counts = [len(curve(table, metric, "test")) for table in tables]
    return min([last, *(count for count in counts if count)])


def group_row(group: Group, metric: str, last: int) -> dict[str, Any] | None:
    """Return a group's row of the table, or ``None`` if none of its runs has the score."""
    scores = [run_scores(table, metric, group.monitor, last) for table in group.runs.values()]
    scores = [row for row in scores if row]
    if not scores:
        return None
    runs = {"group": group.label, "metric": metric, "runs": len(scores), "averaged": last}
    return {**runs, **_mean_and_spread(scores)}


def require_score(groups: Sequence[Group], metric: str, split: str) -> None:
    """Refuse a global score that no run has on this split."""
    names: set[str] = set()
    for group in groups:
        for table in group.runs.values():
            is_global = (table["split"] == split) & (table["scope"] == "global")
            names.update(table[is_global]["metric"])
    if metric not in names:
        alike = [name for name in names if name.count("/") == metric.count("/")]
        near = " or ".join(likeliest(metric, alike, most=3))
        known = ", ".join(sorted(names)) or "none"
        hint = f"did you mean {near}?" if near else f"there are {known}"
        raise FlsuiteError(f"no run has the {split} score {metric!r}; {hint}")


def _mean_and_spread(scores: list[dict[str, float]]) -> dict[str, float]:
    """Return mean and spread of each score over the runs that have it.

    If it is NaN in one of them, so are mean and spread: the others would look like a better method.
    """
    statistics: dict[str, float] = {}
    for name in ("last", "picked", "picked_round", "mean_last", "best_on_test"):
        if any(name in row for row in scores):
            values = pd.Series([row[name] for row in scores if name in row])
            statistics[name] = float(values.mean(skipna=False))
            statistics[f"{name}_std"] = float(values.std(skipna=False))
    return statistics


def report_markdown(table: pd.DataFrame) -> str:
    """Write a table of :func:`report_table` as Markdown, with cells ``mean ± spread``.

    The mean of the last scores is left out if a run has only one.
    """
    titles = score_titles(table)
    headings = ["what differs", "metric", "runs", *titles.values()]
    rows = []
    for row in table.to_dict("records"):
        names = [row["group"].replace("|", "\\|"), row["metric"], str(row["runs"])]
        rows.append([*names, *(score_cell(row, name) for name in titles)])
    return markdown_table(headings, rows)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]]) + "\n"


def score_titles(table: pd.DataFrame) -> dict[str, str]:
    """Return the columns of scores in a table of :func:`report_table`, and their headings."""
    titles = {"last": "last round", "picked": "picked on validation"}
    if averaged := averaged_text(table):
        titles["mean_last"] = f"mean of the {averaged}"
    return titles | {"best_on_test": "best on test"}


def averaged_text(table: pd.DataFrame) -> str:
    """Return which scores ``mean_last`` averages, such as "last 10", or "" for one each."""
    counts = sorted(set(table["averaged"]))
    if counts[-1] == 1:
        return ""
    return "last " + (f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}")


def score_cell(row: Mapping[Any, Any], name: str) -> str:
    """Return a score as ``mean ± spread``, or only the mean for a single run."""
    mean, spread = row.get(name, float("nan")), row.get(f"{name}_std", float("nan"))
    if pd.isna(mean):
        return ""
    return f"{mean:.3f}" if pd.isna(spread) else f"{mean:.3f} ± {spread:.3f}"
