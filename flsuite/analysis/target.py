"""When experiments reach a target score."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.axes import AXES
from flsuite.analysis.groups import Group
from flsuite.analysis.panels import by_experiment, panel_grid
from flsuite.analysis.results import only
from flsuite.analysis.runs import curve, of_last_task, score_rows
from flsuite.errors import FlsuiteError, require_one_of
from flsuite.score_names import lower_is_better


def target_columns(
    group: Group, metric: str, target: float, x: str = "round", split: str = "test"
) -> dict[str, Any]:
    """Return when a group's runs reach a score.

    In a sequence of tasks, only the last task counts.

    Returns:
        ``to_target`` and ``to_target_std`` are mean and standard deviation, with ddof 1, over the
        runs that reach the score, in the unit of the column ``x``. ``reached`` is the number of
        these runs out of all runs with this score, such as ``2/3``, or empty if no run has it.

    Raises:
        FlsuiteError: If it is unknown whether low scores are better.
    """
    lower = _is_lower_better(metric)
    runs = 0
    points: list[float] = []
    for table in group.runs.values():
        scores = curve(of_last_task(table), metric, split, x=x)
        reaching = scores.index[scores <= target if lower else scores >= target]
        runs += int(len(scores) > 0)
        points += reaching[:1].tolist()

    reached = pd.Series(points, dtype=float)
    return {
        "to_target": float(reached.mean()),
        "to_target_std": float(reached.std()),
        "reached": f"{len(reached)}/{runs}" if runs else "",
    }


def _is_lower_better(metric: str) -> bool:
    lower = lower_is_better(metric)
    if lower is None:
        raise FlsuiteError(
            f"target: it is unknown whether {metric!r} should be high or low; choose another metric"
        )
    return lower


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
    lower = _is_lower_better(metric)
    only(results, metric, split)
    rows = []
    for _, table in results[results["scope"] == "global"].groupby("run", observed=True):
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

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        target: The score to reach. A loss is reached from above.
        metric: The score.
        split: ``test`` or ``val``.

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
    return _mean_and_spread(row[x], row[f"{x}_std"] if spread else float("nan"), x)


def target_figure(
    results: pd.DataFrame,
    target: float,
    metric: str = "accuracy",
    x: str = "round",
    split: str = "test",
) -> Figure:
    """Draw when each method reaches a score, with a dot per run and a line at the mean.

    Runs that do not reach it are counted at the right.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        target: The score to reach. A loss is reached from above.
        metric: The score.
        x: The axis.
        split: ``test`` or ``val``.
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
    panel.grid(axis="x", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def target_title(target: float, x: str, split: str = "test", metric: str = "") -> str:
    """Return the heading of the column, such as ``virtual s to accuracy 0.7``.

    The split is named only for validation data.
    """
    goal = [split if split != "test" else "", metric, f"{target:g}"]
    return f"{AXES[x].unit} to {' '.join(filter(None, goal))}"


def target_cell(row: Mapping[Any, Any], x: str) -> str:
    """Return mean and spread of a row's points, and the runs that reach the target, as text."""
    if not row["reached"]:
        return ""
    if pd.isna(row["to_target"]):
        return f"not reached ({row['reached']})"
    return f"{_mean_and_spread(row['to_target'], row['to_target_std'], x)} ({row['reached']})"


def _mean_and_spread(mean: float, spread: float, x: str) -> str:
    """Return numbers of an axis as text, empty if there are none."""
    number = AXES[x].number
    plus_minus = "" if pd.isna(spread) else f" ± {number(spread)}"
    return "" if pd.isna(mean) else f"{number(mean)}{plus_minus}"


def first_to_target(
    table: pd.DataFrame, metric: str, target: float, x: str = "round", split: str = "test"
) -> str | None:
    """Return a line that names the first and the second group to reach the target.

    Only groups that reach it in all of their runs are compared. The result is ``None`` if there are
    fewer than two.

    Args:
        table: A table from :func:`report_table` with a target.
        metric: The score.
        target: The score to reach.
        x: The axis.
        split: ``test`` or ``val``.
    """
    rows = table[(table["metric"] == metric) & table["to_target"].notna()]
    counts = rows["reached"].str.split("/")
    ranked = rows[counts.str[0] == counts.str[1]].sort_values("to_target", kind="stable")
    if len(ranked) < 2:
        return None

    first, second = ranked["group"].iloc[:2]
    soonest, next_soonest = ranked["to_target"].iloc[:2]
    goal, amount = f"{split} {metric} {target:g}", AXES[x].amount
    if soonest == next_soonest:
        return f"{first} and {second} are the first to reach {goal}, both after {amount(soonest)}"
    ratio = f" ({next_soonest / soonest:.2f} times as many)" if soonest > 0 else ""
    return (
        f"{first} is the first to reach {goal}, after {amount(soonest)}; {second} is next, after "
        f"{amount(next_soonest)}{ratio}"
    )
