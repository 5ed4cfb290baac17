"""A figure of when clients trained on the virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from flsuite.analysis.panels import AXES, legend_outside, new_figure, tidy
from flsuite.analysis.runs import read_table, typed
from flsuite.common.arguments import PositiveFloat, PositiveInt, require
from flsuite.common.errors import FlsuiteError

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("fit", "client", "version"), "int64"),
    **dict.fromkeys(("started_s", "ended_s", "merged_s", "weight"), float),
    **dict.fromkeys(("round", "staleness"), "Int64"),
    "outcome": str,
}
_MOST_BARS = 400
_MOST_LINES = 60  # aggregations that are drawn as lines
_MOST_SHADES = 12  # values of staleness with separate shades in the color bar

_FRESH = "#5b9bc8"  # a merge without staleness, if there is no other
_MERGED: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
_STYLES: dict[str, dict[str, Any]] = {  # the fits that were not merged
    "dropped": {"facecolor": "#f0f0f0", "edgecolor": "#9a9a9a", "hatch": "////", "linewidth": 0.5},
    "late": {"facecolor": "#b8b8b8", "edgecolor": "white", "linewidth": 0.4},
    "failed": {"facecolor": "#d1495b", "edgecolor": "white", "linewidth": 0.4},
}


@dataclass
class _View:
    """The part of a timeline that is drawn.

    Attributes:
        fits: Fits of the clients in view that start before the end.
        clients: The clients in view, ascending.
        aggregations: All aggregations before the end: their time (``at``), and the mean and largest
            staleness of their updates.
        end: Virtual seconds at which the view ends.
        title: The title of the figure.
    """

    fits: pd.DataFrame
    clients: list[int]
    aggregations: pd.DataFrame
    end: float
    title: str

    @property
    def most_stale(self) -> int:
        """Return the largest staleness in view."""
        of_fits = self.fits["staleness"].max()
        of_aggregations = self.aggregations["max"].max()
        return max(int(largest) for largest in (of_fits, of_aggregations, 0) if pd.notna(largest))


def read_timeline(run_dir: str | Path) -> pd.DataFrame:
    """Read ``timeline.csv`` of a run, one row per fit that has ended.

    Its columns are ``fit, client, version, started_s, ended_s, outcome, round, merged_s, staleness,
    weight``. Empty cells of ``round`` and ``staleness`` are ``<NA>``.

    Raises:
        FlsuiteError: If the table is missing or cannot be read.
    """
    path = Path(run_dir) / "timeline.csv"
    return typed(read_table(path, grows=True), _TYPES, path)


def timeline_figure(table: pd.DataFrame, clients: int = 40, seconds: float | None = None) -> Figure:
    """Draw the timeline: a row per client, a bar per fit, a vertical line per aggregation.

    The color of a bar is the staleness of its update. A panel above shows the staleness of each
    aggregation, if there is any. Fits in flight at the end of the run are not in the table, so a
    client whose first fit never ended has no row.

    Args:
        table: A table from :func:`read_timeline`.
        clients: Maximum number of clients to show, starting with the lowest number.
        seconds: Virtual seconds to show. Default: as many as fit in 400 bars.

    Raises:
        FlsuiteError: If the table is empty, or an argument is out of range.
    """
    require("timeline_figure", PositiveInt | None, clients=clients)
    require("timeline_figure", PositiveFloat | None, seconds=seconds)
    if table.empty:
        raise FlsuiteError("timeline_figure: no fit has ended yet, so there is nothing to draw")

    view = _view(table, clients, seconds)
    height = min(max(1.8, 1.0 + 0.24 * len(view.clients)), 12)
    if not view.most_stale:
        figure = new_figure(9, height + 0.4)
        bars = figure.subplots()
        _draw_bars(bars, view)
    else:
        figure = new_figure(9, height + 1.6)
        above, bars = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, height])
        _draw_staleness(above, view)
        shades = _draw_bars(bars, view)
        # Both panels make room for the color bar, so that their times stay aligned.
        _add_color_bar(figure, [above, bars], shades, view.most_stale)

    figure.suptitle(view.title, fontsize=10)
    legend_outside(figure, "lower center", _legend(view), ncols=5)
    return figure


def _view(table: pd.DataFrame, clients: int, seconds: float | None) -> _View:
    """Return the clients and the time to draw, with a title that describes them."""
    training = sorted(table["client"].unique().tolist())
    shown = training[:clients]
    fits = table[table["client"].isin(shown)]
    whole = float(table["ended_s"].max())
    end = min(_end(fits["started_s"].to_numpy(), seconds), whole)
    is_whole = end >= whole

    # Fits without duration may start at the very end.
    fits = fits if is_whole else fits[fits["started_s"] < end]
    aggregations = _aggregations(table)
    aggregations = aggregations[aggregations["at"] <= end]

    who = f"{len(training)} clients"
    if len(shown) < len(training):
        who = f"first {len(shown)} of {who}"
    number = AXES["virtual_s"].number
    when = f"{number(whole)} virtual seconds"
    if not is_whole:
        when = f"first {number(end)} of {when}"
    return _View(fits, shown, aggregations, end, f"who trains when: {who}, {when}")


def _end(starts: np.ndarray, seconds: float | None) -> float:
    """Return the end of the view: as given, or so that at most 400 bars start before it."""
    if seconds is not None:
        return seconds
    if len(starts) <= _MOST_BARS:
        return np.inf
    first_left_out = np.sort(starts)[_MOST_BARS]
    # A cohort that starts together is drawn whole, even if it has more bars.
    later = starts[starts > starts.min()]
    return float(max(first_left_out, later.min(initial=np.inf)))


def _aggregations(table: pd.DataFrame) -> pd.DataFrame:
    """Return the time of each aggregation and the staleness of its updates."""
    merged = table[table["outcome"] == "merged"]
    staleness = merged["staleness"].astype(float).groupby(merged["round"]).agg(["mean", "max"])
    return staleness.assign(at=merged.groupby("round")["merged_s"].max())


def _draw_staleness(panel: Axes, view: _View) -> None:
    """Draw the mean and the largest staleness of each aggregation."""
    at, color = view.aggregations["at"], "#33547a"
    panel.plot(at, view.aggregations["mean"], color=color, linewidth=1.2, label="mean")
    panel.plot(
        at, view.aggregations["max"], ".", color=color, markersize=4, alpha=0.5, label="largest"
    )
    panel.set_ylabel("staleness")
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    tidy(panel, "y")
    # Above the panel, because there may be points anywhere in it.
    panel.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2, frameon=False, fontsize=8)


def _draw_bars(panel: Axes, view: _View) -> ScalarMappable:
    """Draw the fits and the aggregations, and return the colors of staleness."""
    shades = _shades(view.most_stale)
    rows = {client: row for row, client in enumerate(view.clients)}
    for outcome, fits in view.fits.groupby("outcome"):
        style = _STYLES.get(str(outcome), _MERGED)
        y = fits["client"].map(rows)
        bars = panel.barh(
            y, fits["ended_s"] - fits["started_s"], left=fits["started_s"], height=0.78, **style
        )
        if outcome == "merged":
            for bar, staleness in zip(bars, fits["staleness"].fillna(0), strict=True):
                shade: Any = shades.to_rgba(np.asarray(staleness))
                bar.set_facecolor(shade if view.most_stale else _FRESH)
        if outcome == "dropped":
            panel.plot(fits["ended_s"], y, "x", color="#555555", markersize=4, zorder=3)

    if _draws_lines(view):
        alpha = 0.6 if len(view.aggregations) <= _MOST_LINES / 2 else 0.3
        for at in view.aggregations["at"]:
            panel.axvline(at, color="#333333", linewidth=0.8, alpha=alpha, zorder=0.5)

    step = max(1, len(view.clients) // 40)
    names = [str(client) for client in view.clients[::step]]
    panel.set_yticks(range(0, len(view.clients), step), names, fontsize=8)
    panel.set_ylim(len(view.clients) - 0.4, -0.6)
    panel.set_xlim(0, view.end * 1.005 or 1.0)  # fits may take no time at all
    panel.set(xlabel="virtual seconds", ylabel="client")
    tidy(panel, grid=None)
    return shades


def _shades(most_stale: int) -> ScalarMappable:
    """Return the colors of staleness, darker for staler updates."""
    colors = ListedColormap(colormaps["YlGnBu"](np.linspace(0.25, 1.0, 256)))
    if most_stale <= _MOST_SHADES:
        return ScalarMappable(BoundaryNorm(np.arange(-0.5, most_stale + 1), 256), colors)
    return ScalarMappable(Normalize(0, most_stale), colors)


def _add_color_bar(
    figure: Figure, panels: Sequence[Axes], shades: ScalarMappable, most_stale: int
) -> None:
    bar = figure.colorbar(
        shades,
        ax=panels,
        label="staleness when merged",
        pad=0.01,
        aspect=5 * figure.get_figheight(),
        fraction=0.03,
    )
    if most_stale <= _MOST_SHADES:
        bar.set_ticks(range(most_stale + 1))
        bar.minorticks_off()
    else:
        bar.locator = MaxNLocator(integer=True)
        bar.update_ticks()


def _draws_lines(view: _View) -> bool:
    return 0 < len(view.aggregations) <= _MOST_LINES


def _legend(view: _View) -> list[Patch | Line2D]:
    """Return a legend entry per kind of mark that the color bar does not explain."""
    handles: list[Patch | Line2D] = []
    outcomes = set(view.fits["outcome"])
    if "merged" in outcomes and not view.most_stale:
        handles.append(Patch(facecolor=_FRESH, label="merged"))
    handles += [Patch(**_STYLES[name], label=name) for name in _STYLES if name in outcomes]
    if _draws_lines(view):
        handles.append(Line2D([], [], color="#333333", linewidth=0.9, label="aggregation"))
    return handles
