"""When experiments reach a target score."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.panels import AXES, by_experiment, panel_grid
from flsuite.analysis.report import markdown_table
from flsuite.analysis.results import only
from flsuite.analysis.runs import of_last_task, score_rows
from flsuite.common.errors import FlsuiteError, require_one_of
from flsuite.common.score_names import lower_is_better


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


def _is_lower_better(metric: str) -> bool:
    lower = lower_is_better(metric)
    if lower is None:
        raise FlsuiteError(
            f"target: it is unknown whether {metric!r} should be high or low; choose another metric"
        )
    return lower
