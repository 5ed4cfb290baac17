"""How soon experiments reach a score."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from flsuite.analysis.axes import AXES, require_axis
from flsuite.analysis.groups import Group
from flsuite.analysis.runs import curve
from flsuite.analysis.scores import lower_is_better, of_last_task
from flsuite.errors import FlsuiteError

__all__ = ["first_to_target", "point_of_target", "target_cell", "target_columns", "target_title"]


def point_of_target(scores: pd.Series, target: float, lower: bool) -> float | None:
    """Return the first point at which a score reaches a target, or ``None``.

    Args:
        scores: The score, indexed by the axis.
        target: The score to reach.
        lower: Whether low scores are good.
    """
    reaching = scores.index[scores <= target if lower else scores >= target]
    return float(reaching[0]) if len(reaching) else None


def target_columns(
    group: Group, metric: str, target: float, x: str = "round", split: str = "test"
) -> dict[str, Any]:
    """Return how soon a group's runs reach a score.

    Of a sequence of tasks, only the last one counts.

    Returns:
        ``to_target`` and ``to_target_std`` are mean and standard deviation, with ddof 1, over the
        runs that reach the score, in the unit of the column ``x``. ``reached`` is the number of
        these runs and that of all runs with this score, such as ``2/3``. It is empty if no run has
        the score.

    Raises:
        FlsuiteError: If it is not known whether low scores are good, or a run lacks the axis.
    """
    lower = lower_is_better(metric)
    if lower is None:
        raise FlsuiteError(
            f"target: it is not known whether {metric!r} should be high or low; choose another "
            "metric"
        )

    points = []
    for folder, table in group.runs.items():
        require_axis(x, table, folder)
        scores = curve(of_last_task(table), metric, split, x=x)
        if len(scores):
            points.append(point_of_target(scores, target, lower))

    reached = pd.Series([point for point in points if point is not None], dtype=float)
    return {
        "to_target": float(reached.mean()),
        "to_target_std": float(reached.std()),
        "reached": f"{len(reached)}/{len(points)}" if points else "",
    }


def target_title(target: float, x: str, split: str = "test", metric: str = "") -> str:
    """Return the heading of the column, such as ``virtual s to accuracy 0.7``.

    Validation data is named, test data is not.
    """
    goal = [split if split != "test" else "", metric, f"{target:g}"]
    return f"{AXES[x].unit} to {' '.join(filter(None, goal))}"


def target_cell(row: Mapping[Any, Any], x: str) -> str:
    """Return mean and spread of a row's points, and the runs that reach the target, as text."""
    if not row["reached"]:
        return ""
    if pd.isna(row["to_target"]):
        return f"not reached ({row['reached']})"
    number, spread = AXES[x].number, row["to_target_std"]
    plus_minus = "" if pd.isna(spread) else f" ± {number(spread)}"
    return f"{number(row['to_target'])}{plus_minus} ({row['reached']})"


def first_to_target(
    table: pd.DataFrame, metric: str, target: float, x: str = "round", split: str = "test"
) -> str | None:
    """Return a line that says which group is the first to reach the target, and which is next.

    Only groups that reach it in all of their runs are compared. The line is ``None`` if there are
    fewer than two.

    Args:
        table: As :func:`report_table` returns it, with a target.
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
