"""Curves over rounds, of many runs or of one."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flsuite.analysis.groups import monitor_of
from flsuite.analysis.panels import (
    AXES,
    aligned,
    by_experiment,
    legend_outside,
    legend_right,
    new_figure,
    panel_grid,
    tidy,
)
from flsuite.analysis.results import only, require_results
from flsuite.analysis.runs import curve, logged, logged_scores, read_metrics, run_scores, score_rows
from flsuite.common.errors import FlsuiteError, require_one_of
from flsuite.common.score_names import shown_score
from flsuite.runs.record import read_settings

_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("", "o", "s", "^", "D", "v", "x")
_MOST_MARKS = 8  # on a line

Band = Literal["range", "std", "95", "none"]
"""What a band around a mean covers: all seeds, one standard deviation, or a 95 % interval."""


def curves_figure(
    runs: pd.DataFrame | Mapping[str, str | Path],
    metrics: Sequence[str] = ("accuracy", "loss"),
    split: str = "test",
    x: str = "round",
    target: float | None = None,
    band: Band = "range",
) -> Figure:
    """Draw the global scores of runs, one panel per metric.

    Lines differ in color, and in dash or marker for print in black and white.

    Args:
        runs: A table from :func:`~flsuite.analysis.load`, or a mapping from label to run folder.
            For a table, each method has a line (the mean over seeds) and a band. Each partition has
            a row of panels, or one panel if there is one metric.
        metrics: Names of scores.
        split: ``val`` or ``test``.
        x: The horizontal axis: ``round``, ``virtual_s``, ``wall_s``, ``client_updates`` or
            ``bytes``.
        target: A value of the first metric, drawn as a dashed line.
        band: ``range`` of the seeds, ``std`` for one standard deviation around the mean, ``95`` for
            the 95 % interval of the mean (of Student's t), or ``none``.

    Raises:
        FlsuiteError: If the axis or the band does not exist.
    """
    require_one_of("curves_figure", AXES, x=x)
    require_one_of("curves_figure", get_args(Band), band=band)
    metrics = [metrics] if isinstance(metrics, str) else metrics
    by_partition = _lines_of(runs, metrics, split, x)
    rows = len(by_partition)
    if len(metrics) == 1:
        figure, single = panel_grid(rows, (4.2, 3.0), shares_y=True)
        panels = [[panel] for panel in single]
    else:
        figure = new_figure(4.6 * len(metrics), 0.4 + 3.0 * rows)
        panels = figure.subplots(rows, len(metrics), squeeze=False, sharey="col").tolist()

    names = dict.fromkeys(
        label for line in by_partition.values() for lines in line.values() for label in lines
    )
    # Some labels have no score in a panel. The others must keep their looks there.
    looks = {label: _look(n) for n, label in enumerate(names)}
    several = isinstance(runs, pd.DataFrame) and runs["partition"].nunique() > 1
    drawn: dict[str, Line2D] = {}
    for line, (partition, by_metric) in zip(panels, by_partition.items(), strict=True):
        for panel, (metric, lines) in zip(line, by_metric.items(), strict=True):
            label_axes(panel, metric, split, x)
            panel.set_title(partition if several else "", fontsize=10)
            if not lines:
                panel.set_axis_off()
            for label, curves in lines.items():
                look = looks[label]
                drawn[textwrap.fill(label, 60)] = _draw_band(panel, curves, label, x, look, band)
            if target is not None and metric == metrics[0]:
                panel.axhline(target, color="0.4", linestyle="--", linewidth=0.8)
    _add_legend(figure, drawn)
    return figure


def _add_legend(figure: Figure, lines: Mapping[str, Line2D]) -> None:
    """Add a legend below all panels, for which the figure grows."""
    if not lines:
        return
    # About 14 characters fit in an inch, and the line before a label takes six.
    longest = max(len(part) for label in lines for part in label.split("\n"))
    columns = max(1, int(14 * figure.get_figwidth()) // (6 + longest))
    height = 0.18 * sum(1 + label.count("\n") for label in lines) / columns
    figure.set_figheight(figure.get_figheight() + height)
    legend_outside(figure, "lower center", [*lines.values()], [*lines], ncols=columns)


Lines = dict[str, pd.DataFrame]
"""A mapping from label to curves, with one column per run."""


def _lines_of(
    runs: pd.DataFrame | Mapping[str, str | Path], metrics: Sequence[str], split: str, x: str
) -> dict[str, dict[str, Lines]]:
    """Return the curves by partition and metric. Single runs are one partition without a name."""
    if isinstance(runs, pd.DataFrame):
        require_results(runs)
        if runs.empty:
            raise FlsuiteError("curves_figure: the table has no rows; choose other runs")
        for metric in metrics:
            only(runs, metric, split)  # refuses a score that no run has
        groups = runs.groupby(["partition", "method"], observed=True)
        tables = {(str(partition), str(method)): own for (partition, method), own in groups}
    else:
        tables = {("", name): read_metrics(run).assign(run=name) for name, run in runs.items()}
    by_partition: dict[str, dict[str, Lines]] = {}
    for (partition, label), own in tables.items():
        for metric in metrics:
            if len(rows := score_rows(own, metric, split)):
                lines = by_partition.setdefault(partition, {name: {} for name in metrics})
                lines[metric][label] = seed_curves(rows, x)
    by_partition = by_partition or {"": {metric: {} for metric in metrics}}
    return {name: by_partition[name] for name in sorted(by_partition, key=_by_number)}


def _by_number(name: str) -> list[tuple[float, str]]:
    """Return a key that sorts ``alpha=3`` before ``alpha=10``."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if n % 2 else (0.0, part) for n, part in enumerate(parts)]


def seed_curves(rows: pd.DataFrame, x: str) -> pd.DataFrame:
    """Return a score of one experiment with one column per run, see :func:`aligned`.

    Args:
        rows: The score's rows in a table from :func:`~flsuite.analysis.load`.
        x: The axis.
    """
    curves = {
        str(run): own.set_index(x)["value"] for run, own in rows.groupby("run", observed=True)
    }
    return aligned(curves, x)


def _look(number: int) -> dict[str, Any]:
    """Return color, dash and marker of a line. The first 28 differ in dash or marker."""
    rest, dash = divmod(number, len(_DASHES))
    marker = _MARKERS[rest % len(_MARKERS)]
    return {"color": f"C{number % 10}", "linestyle": _DASHES[dash], "marker": marker}


def _draw_band(
    panel: Axes,
    curves: pd.DataFrame,
    label: str,
    x: str,
    look: Mapping[str, Any],
    band: Band = "range",
) -> Line2D:
    """Draw the mean of curves with a band, and return the line.

    Args:
        panel: The panel to draw in.
        curves: One column per run, indexed by the axis.
        label: The label.
        x: The axis.
        look: Color, dash and marker of the line.
        band: What the band covers, see :func:`curves_figure`.
    """
    points = curves.index * AXES[x].scale
    line = panel.plot(
        points, curves.mean(axis=1), label=textwrap.fill(label, 40), linewidth=1.6, **look
    )[0]
    line.set(markersize=4, markevery=-(-max(len(points), 1) // _MOST_MARKS))
    if len(points) == 1 and not look.get("marker"):
        line.set_marker("o")  # a line of one point is invisible
    if curves.shape[1] > 1 and band != "none":
        low, high = _limits(curves, band)
        panel.fill_between(points, low, high, color=line.get_color(), alpha=0.15, lw=0)
    return line


def _limits(curves: pd.DataFrame, band: Band) -> tuple[pd.Series, pd.Series]:
    """Return the limits of the band around the mean of curves."""
    if band == "range":
        return curves.min(axis=1), curves.max(axis=1)
    mean, spread = curves.mean(axis=1), curves.std(axis=1)
    if band == "95":
        from scipy.stats import t  # late, because it takes a while to import

        seeds = curves.count(axis=1)
        spread = spread * t.ppf(0.975, seeds - 1) / np.sqrt(seeds)
    return mean - spread, mean + spread


def label_axes(panel: Axes, metric: str, split: str, x: str) -> None:
    """Name the axes of a panel of curves, and give it a grid."""
    panel.set(xlabel=AXES[x].label, ylabel=f"{split} {shown_score(metric)}".strip())
    panel.xaxis.set_major_locator(MaxNLocator(integer=AXES[x].is_whole))
    # Ticks that depend on the panel's size would change after the layout, and cut off its label.
    panel.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    tidy(panel)


GAMMA = {
    "gamma": "gamma",
    "gamma_relative": "gamma / ||mean gradient||²",
    "gamma_orig": "gamma at the plain input",
    "R": "R",
    "Phi": "Phi",
}
"""The numbers of :class:`~flsuite.callbacks.GradientDissimilarity`, and their names in figures."""


def gamma_figure(results: pd.DataFrame, x: str = "round") -> Figure:
    """Draw gamma and its parts, as far as they were logged, one panel each.

    Lines are means over seeds, and bands are their range.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        x: The axis, as for :func:`~flsuite.analysis.curves_figure`.

    Raises:
        FlsuiteError: If no run has logged gamma.
    """
    parts = gamma_parts(results)
    if not parts:
        raise FlsuiteError(
            "gamma_figure: no run has logged gamma; add the callback GradientDissimilarity to "
            "trainer.callbacks"
        )
    figure, panels = panel_grid(len(parts), (3.8, 2.9))
    for panel, name in zip(panels, parts, strict=True):
        # Only fused models have all parts. The number keeps their look in all panels.
        for n, (label, rows) in enumerate(by_experiment(results).items()):
            own = score_rows(rows, name, "train")
            if len(own):
                _draw_band(panel, seed_curves(own, x), label, x, _look(n))
        label_axes(panel, name, "train", x)
        panel.set_ylabel(GAMMA[name])
        if (score_rows(results, name, "train")["value"] > 0).all():
            panel.set_yscale("log")
    if len(panels[0].lines) > 1:
        legend_right(figure, panels[0])
    return figure


def gamma_parts(results: pd.DataFrame) -> list[str]:
    """Return the names in :data:`GAMMA` that any run has logged."""
    require_results(results)
    names = logged([results], "train")
    return [name for name in GAMMA if name in names]


MOST_SCORES = 4
"""Number of scores that are shown by default."""
_STYLES = {"test": ("test", _look(0)), "val": ("validation", _look(1))}


def run_figure(run_dir: str | Path, x: str = "round") -> Figure:
    """Draw the global scores of a run, with the round that was picked on validation data.

    There is a panel for the run's monitor, and for up to three other logged scores, or for the
    training loss if there are no scores.

    Args:
        run_dir: The run's folder.
        x: The horizontal axis, as for :func:`~flsuite.analysis.curves_figure`.

    Raises:
        FlsuiteError: If the run has no scores yet, or the axis does not exist.
    """
    table, monitor = read_metrics(run_dir), monitor_of(read_settings(Path(run_dir)))
    require_one_of("run_figure", AXES, x=x)
    names, styles = logged_scores([table], monitor)[:MOST_SCORES], _STYLES
    if not names:
        names = [name for name in logged_scores([table], "loss", ["train"]) if name == "loss"]
        styles = {"train": ("training", _look(2))}
    if not names:
        raise FlsuiteError(f"{run_dir} has no scores yet")
    # The monitor itself may have no test scores.
    rows = [run_scores(table, name, monitor, last=1) for name in names]
    picked = next((row["picked_round"] for row in rows if "picked_round" in row), None)

    figure, panels = panel_grid(len(names), (4.6, 3.2))
    for panel, name in zip(panels, names, strict=True):
        for split, (label, look) in styles.items():
            if len(scores := curve(table, name, split, x=x)):
                _draw_band(panel, scores.to_frame(), label, x, look)
        if picked is not None:
            _mark(panel, table, name, int(picked), x)
        label_axes(panel, name, "", x)
        if AXES[x].is_whole:
            _end_ticks_at(panel, float(table[x].min()), float(table[x].max()))
    # Below the panels, where it does not cover lines.
    legends = [zip(*panel.get_legend_handles_labels()[::-1], strict=True) for panel in panels]
    lines = dict(chain.from_iterable(legends))  # one line per label
    handles, labels = [*lines.values()], [*lines]
    legend_outside(figure, "lower center", handles, labels, fontsize=9, ncols=3)
    return figure


def _mark(panel: Axes, table: pd.DataFrame, name: str, picked: int, x: str) -> None:
    """Mark the picked round and its test score."""
    rows = table[table["round"] == picked]
    at = float(rows[x].iloc[0]) * AXES[x].scale
    panel.axvline(at, color="0.5", linestyle=":", linewidth=1.0)
    scores = curve(rows, name, "test")
    if len(scores):
        label = f"picked on validation (round {picked})"
        panel.plot([at], scores.iloc[0], "o", color="C0", markersize=7, mfc="white", label=label)


def _end_ticks_at(panel: Axes, first: float, last: float) -> None:
    """Put the last tick at the last point, and drop ticks too close to it or before the first."""
    limits = panel.get_xlim()
    gap = 0.08 * (limits[1] - limits[0])
    panel.set_xticks([t for t in panel.get_xticks() if first <= t < last - gap] + [last])
    panel.set_xlim(limits)
