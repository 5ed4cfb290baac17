"""Comparison of experiments: mean and spread over their runs, and when they reach a target."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.groups import Group, find_runs, group_runs, tables_of
from flsuite.analysis.panels import AXES, by_experiment, panel_grid, tidy
from flsuite.analysis.results import only, run_tables
from flsuite.analysis.runs import curve, logged, logged_scores, of_last_task, run_scores, score_rows
from flsuite.common.errors import FlsuiteError, likeliest, require_one_of
from flsuite.common.score_names import lower_is_better, shown_number


def default_metrics(groups: Sequence[Group], splits: Sequence[str], most: int) -> list[str]:
    """Return the default scores to compare: the monitors by which the runs pick a round.

    For a single experiment, its other scores are added, up to ``most`` in all. Scores that were not
    logged on all splits are left out.
    """
    monitors = list(dict.fromkeys(group.monitor for group in groups))
    # Where some methods have personal models, the clients' own test data come first.
    monitors.sort(key=lambda name: not name.endswith("_client_mean"))
    tables = tables_of(groups)
    known = [logged_scores(tables, monitors[0], [split]) for split in splits]
    shared = [name for name in known[0] if all(name in names for names in known)]
    chosen = [name for name in monitors if name in shared] or shared[:1]
    return shared[:most] if len(groups) == 1 and shared else chosen or monitors


def report_table(
    groups: Sequence[Group] | str | Path,
    metrics: Sequence[str] = ("accuracy",),
    last: int = 10,
) -> pd.DataFrame:
    """Return one row per group and metric, with mean and spread over its runs.

    The columns are ``group, metric, runs, averaged``, then mean and spread of each score of
    :func:`run_scores`. The spread is the standard deviation with ddof 1, empty for a single run.

    Args:
        groups: The experiments, or a folder with their runs, such as ``runs/comparison``.
        metrics: Names of test scores.
        last: Number of evaluations in ``mean_last``. A shorter run lowers it for all. ``averaged``
            is the number used.

    Raises:
        FlsuiteError: If no run has one of the metrics.
    """
    groups = group_runs(find_runs([groups])) if isinstance(groups, (str, Path)) else groups
    metrics = [metrics] if isinstance(metrics, str) else metrics
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
    counts = [len(curve(of_last_task(table), metric, "test")) for table in tables_of(groups)]
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
    names = logged(tables_of(groups), split)
    if not names:
        step = "test_step" if split == "test" else "validation_step"
        raise FlsuiteError(
            f"no run has {split} scores: give the data a {split} split, and a model that is no "
            f"classifier a {step} that returns a loss"
        )
    if metric not in names:
        alike = [name for name in names if name.count("/") == metric.count("/")]
        near = " or ".join(likeliest(metric, alike, most=3))
        hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(names))}"
        raise FlsuiteError(f"no run has the {split} score {metric!r}; {hint}")


def _mean_and_spread(scores: list[dict[str, float]]) -> dict[str, float]:
    """Return mean and spread of each score over the runs that have it.

    If it is NaN in one of them, so are mean and spread: the others would look like a better method.
    """
    statistics: dict[str, float] = {}
    for name in ("last", "picked", "picked_round", "mean_last", "best_on_test"):
        if any(name in row for row in scores):
            values = pd.Series([row[name] for row in scores if name in row])
            statistics[name], statistics[f"{name}_std"] = mean_and_spread(values)
    return statistics


def mean_and_spread(values: pd.Series) -> tuple[float, float]:
    """Return the mean and the standard deviation with ddof 1, NaN if it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite or huge losses
        mean, spread = float(values.mean(skipna=False)), float(values.std(skipna=False))
    return mean, spread if np.isfinite(spread) else np.nan


def report_markdown(
    table: pd.DataFrame, marked: Collection[tuple[str, str]] = (), notes: Sequence[str] = ()
) -> str:
    """Write a table of :func:`report_table` as Markdown, with cells ``mean ± spread``.

    The mean of the last scores is left out if a run has only one.

    Args:
        table: The table.
        marked: The groups and metrics whose rows have a star.
        notes: Lines below the table.
    """
    titles = score_titles(table)
    headings = ["what differs", "metric", "runs", *titles.values()]
    rows = []
    for row in table.to_dict("records"):
        star = " \\*" if (row["group"], row["metric"]) in marked else ""
        names = [row["group"].replace("|", "\\|") + star, row["metric"], str(row["runs"])]
        rows.append([*names, *(score_cell(row, name) for name in titles)])
    lines = ["\\" * line.startswith("*") + line + "\n" for line in notes]
    return "\n".join([markdown_table(headings, rows), *lines])


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
    return " ± ".join(shown_number(value, 3) for value in (mean, spread) if not pd.isna(value))


def target_points(
    results: pd.DataFrame, target: float, metric: str = "accuracy", split: str = "test"
) -> pd.DataFrame:
    """Return where each run first reaches a score, on all axes.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        target: The score to reach. A loss is reached from above.
        metric: The score.
        split: ``test`` or ``val``.

    Returns:
        One row per run: ``run, method, partition, seed``, and the columns of the clock, which are
        empty if the run does not reach the score. In a sequence of tasks, only the last task
        counts.

    Raises:
        FlsuiteError: If no run has the score, or it is unknown whether it should be low.
    """
    lower = is_lower_better(metric)
    only(results, metric, split)
    rows = []
    for table in run_tables(results):
        scores = score_rows(of_last_task(table), metric, split).sort_values("round")
        reaching = scores["value"] <= target if lower else scores["value"] >= target
        if len(scores):
            clock = scores.loc[reaching, list(AXES)].head(1)
            names = table[["run", "method", "partition", "seed"]].iloc[0].to_dict()
            rows.append(names | (clock.iloc[0].to_dict() if len(clock) else {}))
    return pd.DataFrame(rows).reindex(columns=["run", "method", "partition", "seed", *AXES])


def target_table(
    results: pd.DataFrame, target: float, metric: str = "accuracy", split: str = "test"
) -> pd.DataFrame:
    """Return when each method reaches a score, on all axes.

    The arguments are the same as for :func:`target_points`.

    Returns:
        One row per method and partition: ``method, partition, runs, reached``, and mean and
        standard deviation per axis over the runs that reach it, such as ``wall_s, wall_s_std``.
    """
    points = target_points(results, target, metric, split)
    groups = points.groupby(["method", "partition"], observed=True, sort=False)
    table = groups.agg(runs=("run", "size"), reached=("round", "count"))
    for x in AXES:
        column = groups[x]
        table[x], table[f"{x}_std"] = column.mean(), column.std()
    return table.reset_index()


def own_targets(results: pd.DataFrame, metric: str, split: str = "test") -> dict[str, float]:
    """Return a target per partition: 95 % of the best method's mean last score over seeds.

    Targets are rounded to two digits. There are none for losses and for scores of unknown
    direction.
    """
    if lower_is_better(metric) is not False:
        return {}
    rows = only(results, metric, split).sort_values("round")
    last = rows.drop_duplicates("run", keep="last")
    means = last.groupby(["partition", "method"], observed=True)["value"].mean()
    best = means.groupby("partition", observed=True, sort=False).max()
    return {str(name): float(f"{0.95 * top:.2g}") for name, top in best.items() if top > 0}


def amount_cell(row: Mapping[Any, Any], x: str, spread: bool = True) -> str:
    """Return the mean of a row of :func:`target_table` on an axis as text, with its spread."""
    number, mean, std = AXES[x].number, row[x], row[f"{x}_std"]
    plus_minus = f" ± {number(std)}" if spread and pd.notna(std) else ""
    return "" if pd.isna(mean) else f"{number(mean)}{plus_minus}"


def target_figure(
    results: pd.DataFrame,
    target: float,
    metric: str = "accuracy",
    x: str = "round",
    split: str = "test",
) -> Figure:
    """Draw when each method reaches a score, with a dot per run and a line at the mean.

    Runs that do not reach it are counted at the right. The other arguments are the same as for
    :func:`target_points`.

    Args:
        x: The axis.
    """
    if isinstance(target, str):
        raise FlsuiteError(f"target_figure: target must be a number, got {target!r}; then metric")
    points = target_points(results, target, metric, split)
    require_one_of("target_figure", AXES, x=x)
    groups = by_experiment(points)
    figure, (panel,) = panel_grid(1, (6.0, 0.9 + 0.36 * len(groups)))
    for row, runs_of_method in enumerate(groups.values()):
        total, reached = len(runs_of_method), runs_of_method[x].dropna().astype(float)
        reached = reached * AXES[x].scale
        panel.scatter(reached, [row] * len(reached), s=22, alpha=0.7, linewidths=0)
        if len(reached):
            panel.plot([reached.mean()] * 2, [row - 0.3, row + 0.3], color="0.2", linewidth=1.4)
        if missing := total - len(reached):
            text, where = f"not reached in {missing} of {total}", panel.get_yaxis_transform()
            panel.text(1.01, row, text, transform=where, va="center", fontsize=8, color="0.4")

    panel.set_yticks(range(len(groups)), list(groups))
    panel.set_ylim(len(groups) - 0.4, -0.6)
    panel.set_xlim(left=0)
    only_some = points[x].isna().any()
    runs = ", of the runs that reach it" if only_some else ""
    panel.set_xlabel(f"{AXES[x].label} to {split} {metric} {target:g}{runs}")
    tidy(panel, "x")
    return figure


def target_markdown(table: pd.DataFrame, goal: str) -> str:
    """Write a table of :func:`target_table` as Markdown, with cells ``mean ± spread``."""
    heads = ["method", "partition", *(axis.unit for axis in AXES.values()), "reached"]
    rows = []
    for row in table.to_dict("records"):
        amounts = [amount_cell(row, x) for x in AXES]
        reached = f"{row['reached']} of {row['runs']}"
        rows.append([row["method"], row["partition"], *amounts, reached])
    return f"To {goal}, means of runs that reach it:\n\n{markdown_table(heads, rows)}"


def first_to_target(table: pd.DataFrame, goal: str, x: str = "round") -> str | None:
    """Return a line that names the first and the second method to reach the target.

    Only methods that reach it in all of their runs are compared. The result is ``None`` if there
    are fewer than two.

    Args:
        table: A table from :func:`target_table`.
        goal: The score to reach, as text.
        x: The axis.
    """
    ranked = table[table["reached"] == table["runs"]].sort_values(x, kind="stable")
    if len(ranked) < 2:
        return None

    several = table["partition"].nunique() > 1
    names = [
        f"{row['method']}, {row['partition']}" if several else row["method"]
        for row in ranked.to_dict("records")
    ]
    soonest, next_soonest = ranked[x].iloc[:2]
    amount, ties = AXES[x].amount, int((ranked[x] == soonest).sum())
    if ties > 1:
        all_first = f"{', '.join(names[: ties - 1])} and {names[ties - 1]}"
        return f"{all_first} are the first to reach {goal}, after {amount(soonest)}"
    first, second = names[:2]
    ratio = f" ({next_soonest / soonest:.2f} times as many)" if soonest > 0 else ""
    return (
        f"{first} is the first to reach {goal}, after {amount(soonest)}; {second} is next, after "
        f"{amount(next_soonest)}{ratio}"
    )


def is_lower_better(metric: str) -> bool:
    """Return whether a score should be low, and refuse one of unknown direction."""
    lower = lower_is_better(metric)
    if lower is None:
        raise FlsuiteError(
            f"it is unknown whether {metric!r} should be high or low; choose another metric"
        )
    return lower
