"""Ranks of methods across data sets: Friedman's test and Nemenyi's critical difference.

Demšar 2006, Statistical Comparisons of Classifiers over Multiple Data Sets, section 3.2.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsuite.analysis.comparison import Score, seed_scores
from flsuite.analysis.panels import new_figure
from flsuite.analysis.report import is_lower_better
from flsuite.common.errors import FlsuiteError
from flsuite.common.score_names import shown_score

_LEVEL = 0.05
_ROW = 0.24  # inches between two names of the picture


class Ranks(NamedTuple):
    """The ranks of methods across data sets.

    Attributes:
        table: A row per method, the best first: ``method``, its mean ``rank``, and its rank on each
            data set. Rank 1 is the best, and equal scores share the mean of their ranks.
        p: The p-value of Friedman's test. A small one says that the methods are not all alike.
        critical: Nemenyi's critical difference at 5 %. Two methods differ if their mean ranks are
            further apart.
    """

    table: pd.DataFrame
    p: float
    critical: float

    def line(self, metric: str) -> str:
        """Return the ranks as a sentence."""
        means = [f"{row['method']} {row['rank']:.2f}" for row in self.table.to_dict("records")]
        return (
            f"Mean ranks by test {shown_score(metric)} over {self.table.shape[1] - 2} partitions: "
            f"{', '.join(means)}. Friedman's test has p = {self.p:.4f}. Ranks differ from "
            f"{self.critical:.2f} on (Nemenyi, 5 %)."
        )


def ranks(results: pd.DataFrame, metric: str = "accuracy", score: Score | None = None) -> Ranks:
    """Rank the methods on each data set by their mean score over seeds.

    A data set is a partition of a table from :func:`~flsuite.analysis.load`. The test takes them
    as independent, which several splits of the same samples are not quite. Those on which a method
    has no score, or no finite one, are left out.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metric: The score.
        score: ``last`` or ``picked``, as for :func:`~flsuite.analysis.compare`.

    Raises:
        FlsuiteError: If fewer than three methods share two data sets, or it is unknown whether the
            score should be low.
    """
    from scipy.stats import friedmanchisquare, studentized_range  # they take a while to import

    values = seed_scores(results, metric, score)
    means = values.pivot_table(
        index="partition", columns="method", values="value", aggfunc=_mean, sort=False
    )
    means = means.replace([np.inf, -np.inf], np.nan).dropna()
    sets, methods = means.shape
    if methods < 3 or sets < 2:
        raise FlsuiteError(
            f"ranks: {methods} methods share scores on {sets} partitions; Friedman's test needs "
            "three methods and two partitions"
        )

    by_set = means.rank(axis=1, ascending=is_lower_better(metric)).T
    table = by_set.assign(rank=by_set.mean(axis=1)).sort_values("rank", kind="stable")
    table = table.rename_axis(columns=None)[["rank", *by_set.columns]].reset_index()
    # All methods alike on every data set: the statistic is 0 / 0, and nothing differs.
    p = friedmanchisquare(*by_set.to_numpy()).pvalue if by_set.nunique(axis=0).max() > 1 else 1.0
    quantile = studentized_range.ppf(1 - _LEVEL, methods, np.inf) / np.sqrt(2)
    return Ranks(table, float(p), float(quantile * np.sqrt(methods * (methods + 1) / (6 * sets))))


def _mean(values: pd.Series) -> float:
    """Return the mean, NaN if a seed has no score."""
    return float(values.mean(skipna=False))


def ranks_figure(
    results: pd.DataFrame, metric: str = "accuracy", score: Score | None = None
) -> Figure:
    """Draw the mean ranks on an axis, the best at the left. A bar joins methods that do not differ.

    The arguments are the same as for :func:`ranks`.
    """
    result = ranks(results, metric, score)
    names, means = result.table["method"].tolist(), result.table["rank"].tolist()
    bars = _alike(means, result.critical)
    half = -(-len(names) // 2)
    first_row = 1.2 + 0.6 * len(bars)
    height = first_row + half
    figure = new_figure(6.4, 0.5 + _ROW * (height + 2))
    panel = figure.subplots()

    _draw_ruler(panel, len(names), result)
    for number, (first, last) in enumerate(bars):
        level = 0.7 + 0.6 * number
        ends = means[first] - 0.03, means[last] + 0.03
        panel.plot(ends, [level, level], color="black", linewidth=3.5, solid_capstyle="butt")
    # The better half at the left, from the top down. The other half from the bottom up.
    left, right = 1 - 0.15, len(names) + 0.15
    for number, (name, rank) in enumerate(zip(names, means, strict=True)):
        is_left = number < half
        row = first_row + (number if is_left else len(names) - 1 - number)
        side = left if is_left else right
        panel.plot([rank, rank, side], [0, row, row], color="0.2", linewidth=0.9)
        x, ha = (side - 0.05, "right") if is_left else (side + 0.05, "left")
        panel.text(x, row, f"{name} ({rank:.2f})", ha=ha, va="center", fontsize=9)
    panel.set(xlim=(left, right), ylim=(height, -2.2))
    panel.set_axis_off()
    return figure


def _draw_ruler(panel: Axes, methods: int, result: Ranks) -> None:
    """Draw the axis of ranks, and the critical difference above it."""
    panel.plot([1, methods], [0, 0], color="black", linewidth=1)
    for rank in range(1, methods + 1):
        panel.plot([rank, rank], [0, -0.25], color="black", linewidth=1)
        panel.text(rank, -0.35, f"{rank}", ha="center", va="bottom", fontsize=9)
    end = 1 + result.critical
    look: dict[str, Any] = {"color": "black", "linewidth": 1.2, "markersize": 7, "clip_on": False}
    panel.plot([1, end], [-1.5, -1.5], "|-", **look)  # it may be longer than the axis
    text = f"critical difference {result.critical:.2f}"
    panel.text(end + 0.06, -1.5, text, va="center", fontsize=8)


def _alike(means: list[float], critical: float) -> list[tuple[int, int]]:
    """Return first and last position of each longest run of sorted ranks that do not differ."""
    runs: list[tuple[int, int]] = []
    for first, rank in enumerate(means):
        last = max(n for n, other in enumerate(means) if other - rank <= critical)
        if last > first and (not runs or last > runs[-1][1]):
            runs.append((first, last))
    return runs
