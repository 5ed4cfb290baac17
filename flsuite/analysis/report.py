"""Comparison of experiments: mean and spread over their runs, as a table and as curves."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsuite.analysis.groups import Group
from flsuite.analysis.runs import curve
from flsuite.errors import FlsuiteError

__all__ = ["report_figure", "report_markdown", "report_table"]

_UP = (
    "accuracy",
    "f1_macro",
    "balanced_accuracy",
    "auroc",
    "probe_",
    "task_",
    "backward_",
    "forward_",
    "sample_agreement",
)
_DOWN = ("loss", "nll", "kl", "reconstruction", "forgetting", "flow_nll")


def lower_is_better(metric: str) -> bool | None:
    """Return whether low values of a score are good, or ``None`` if that is not known.

    Without it no round can be called the best.
    """
    metric = metric.removeprefix("all_clients/")
    if metric.endswith("_std") or metric.startswith(_DOWN):
        return True
    return False if metric.startswith(_UP) else None


def run_scores(table: pd.DataFrame, metric: str, monitor: str, last: int) -> dict[str, float]:
    """Return the test scores of one run, or nothing if it has no such score.

    Args:
        table: The metrics of the run.
        metric: The score.
        monitor: The score on validation data that picks a round.
        last: Rounds that ``mean_last`` is the mean of.

    Returns:
        ``last`` is the score of the last round. ``picked`` is that of the round whose ``monitor``
        is best on validation data, of equals the earlier one. ``mean_last`` is the mean over the
        last rounds. ``best_on_test`` is for comparison with tables that were made so: no honest
        choice could have picked it.
    """
    tasks = curve(table, "task", "train")
    if len(tasks):  # scores after different tasks are not of the same classes
        table = table[table["round"].isin(tasks.index[tasks == tasks.max()])]
    test, validation = curve(table, metric, "test"), curve(table, monitor, "val")
    if test.empty:
        return {}
    scores = {"last": float(test.iloc[-1]), "mean_last": float(test.iloc[-last:].mean())}

    validation = validation[validation.index.isin(test.index)].dropna()
    if len(validation) and lower_is_better(monitor) is not None:
        losses = validation if lower_is_better(monitor) else -validation
        picked = validation.index[int(losses.argmin())]  # argmin gives the earlier of equals
        scores |= {"picked": float(test[picked]), "picked_round": float(picked)}

    if (lower := lower_is_better(metric)) is not None:
        scores["best_on_test"] = float(test.min() if lower else test.max())
    return scores


def report_table(
    groups: Sequence[Group], metrics: Sequence[str] = ("accuracy",), last: int = 10
) -> pd.DataFrame:
    """Return one row per group and metric, with mean and spread over its runs.

    The columns are ``group, metric, runs``, then mean and spread of each score of
    :func:`run_scores`. The spread is the standard deviation with ddof 1, empty for a single run.

    Args:
        groups: The experiments.
        metrics: Names of test scores.
        last: Rounds that ``mean_last`` is the mean of.

    Raises:
        FlsuiteError: If no run has one of the metrics.
    """
    rows: list[dict[str, Any]] = []
    for metric in metrics:
        with_score = [row for group in groups if (row := _group_row(group, metric, last))]
        if not with_score:
            known = ", ".join(_test_scores(groups))
            raise FlsuiteError(f"no run has the test score {metric!r}; there are {known}")
        rows += with_score
    return pd.DataFrame(rows)


def _group_row(group: Group, metric: str, last: int) -> dict[str, Any] | None:
    """Return a group's row of the table, or ``None`` if no run of it has the score."""
    monitor = str(group.settings.get("monitor", "accuracy"))
    scores = [run_scores(table, metric, monitor, last) for table in group.runs.values()]
    scores = [row for row in scores if row]
    if not scores:
        return None
    runs = {"group": group.label, "metric": metric, "runs": len(scores)}
    return {**runs, **_mean_and_spread(scores)}


def _test_scores(groups: Sequence[Group]) -> list[str]:
    """Return the names of all global test scores."""
    names: set[str] = set()
    for group in groups:
        for table in group.runs.values():
            is_global_test = (table["split"] == "test") & (table["scope"] == "global")
            names.update(table[is_global_test]["metric"])
    return sorted(names)


def _mean_and_spread(scores: list[dict[str, float]]) -> dict[str, float]:
    table = pd.DataFrame(scores)
    statistics: dict[str, float] = {}
    for name in ("last", "picked", "picked_round", "mean_last", "best_on_test"):
        if name in table:
            statistics[name] = float(table[name].mean())
            statistics[f"{name}_std"] = float(table[name].std())
    return statistics


def report_markdown(table: pd.DataFrame, last: int = 10) -> str:
    """Write the table as Markdown, with cells ``mean ± spread``."""
    titles = {
        "last": "last round",
        "picked": "picked on validation",
        "mean_last": f"mean of the last {last}",
        "best_on_test": "best on test",
    }
    lines = [
        f"| what differs | metric | runs | {' | '.join(titles.values())} |",
        "|---|---|---|" + "---|" * len(titles),
    ]
    for row in table.to_dict("records"):
        cells = [_cell(row, name) for name in titles]
        lines.append(f"| {row['group']} | {row['metric']} | {row['runs']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[Any, Any], name: str) -> str:
    mean, spread = row.get(name, float("nan")), row.get(f"{name}_std", float("nan"))
    if pd.isna(mean):
        return ""
    return f"{mean:.3f}" if pd.isna(spread) else f"{mean:.3f} ± {spread:.3f}"


def report_figure(
    groups: Sequence[Group], metrics: Sequence[str] = ("accuracy",), split: str = "test"
) -> Figure:
    """Draw the global scores over rounds: the mean of each group's runs, and their range."""
    height = 3.6 + 0.2 * len(groups)
    figure = Figure(figsize=(max(5.2, 4.6 * len(metrics)), height), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for group in groups:
            curves = group.curves(metric, split)
            line = panel.plot(
                curves.index,
                curves.mean(axis=1),
                label=f"{group.label} ({curves.shape[1]})",
                linewidth=1.6,
                marker="o" if len(curves.index) == 1 else None,  # a line of one point is invisible
            )[0]
            panel.fill_between(
                curves.index,
                curves.min(axis=1),
                curves.max(axis=1),
                color=line.get_color(),
                alpha=0.15,
                lw=0,
            )
        panel.set(xlabel="round", ylabel=f"{split} {metric.replace('_', ' ')}")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8
    )
    return figure
