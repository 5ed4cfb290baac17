"""The figure of one run: its scores on validation and test data."""

from itertools import chain
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsuite.analysis.axes import AXES
from flsuite.analysis.curves import label_axes
from flsuite.analysis.groups import monitor_of
from flsuite.analysis.panels import panel_grid
from flsuite.analysis.runs import curve, logged_scores, read_metrics, run_scores
from flsuite.common.errors import FlsuiteError, require_one_of
from flsuite.runs.record import read_settings

MOST_SCORES = 4
"""Number of scores that are shown by default."""
_STYLES = {"test": ("test", "C0", "-"), "val": ("validation", "C1", "--")}


def run_figure(run_dir: str | Path, x: str = "round") -> Figure:
    """Draw the global scores of a run, with the round that was picked on validation data.

    There is a panel for the run's monitor, and for up to three other logged scores.

    Args:
        run_dir: The run's folder.
        x: The horizontal axis, as for :func:`~flsuite.analysis.curves_figure`.

    Raises:
        FlsuiteError: If the run has no scores yet, or the axis does not exist.
    """
    table, monitor = read_metrics(run_dir), monitor_of(read_settings(Path(run_dir)))
    require_one_of("run_figure", AXES, x=x)
    names = logged_scores([table], monitor)[:MOST_SCORES]
    if not names:
        raise FlsuiteError(f"{run_dir} has no scores yet")
    # The monitor itself may have no test scores.
    scores = [run_scores(table, name, monitor, last=1) for name in names]
    picked = next((row["picked_round"] for row in scores if "picked_round" in row), None)

    figure, panels = panel_grid(len(names), (4.6, 3.2))
    for panel, name in zip(panels, names, strict=True):
        for split in _STYLES:
            _draw(panel, table, name, split, x)
        if picked is not None:
            _mark(panel, table, name, int(picked), x)
        label_axes(panel, name, "", x)
        if AXES[x].is_whole:
            _end_ticks_at(panel, float(table[x].min()), float(table[x].max()))
    # Below the panels, where it does not cover lines.
    legends = [zip(*panel.get_legend_handles_labels()[::-1], strict=True) for panel in panels]
    lines = dict(chain.from_iterable(legends))  # one line per label
    figure.legend(
        [*lines.values()], [*lines], loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def _draw(panel: Axes, table: pd.DataFrame, name: str, split: str, x: str) -> None:
    """Draw a score on one split, if it was logged."""
    scores = curve(table, name, split, x=x)
    if len(scores):
        label, color, line = _STYLES[split]
        marker = "o" if len(scores) == 1 else None  # a line of one point is invisible
        points = scores.index * AXES[x].scale
        panel.plot(points, scores, line, color=color, label=label, marker=marker, linewidth=1.6)


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
