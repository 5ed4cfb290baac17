"""Paired comparisons of methods: differences over common seeds, with intervals and p-values."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from flsuite.analysis.report import markdown_table
from flsuite.analysis.results import only, run_tables
from flsuite.analysis.runs import run_scores
from flsuite.analysis.sequential import decisions_of
from flsuite.common.errors import FlsuiteError, require_one_of
from flsuite.common.score_names import shown_number, shown_score

LEVEL = 0.05
"""The level of all tests."""
Score = Literal["last", "picked"]


def compare(
    results: pd.DataFrame,
    metric: str = "accuracy",
    score: Score | None = None,
    against: str | None = None,
) -> pd.DataFrame:
    """Compare methods in pairs over their common seeds, within the same partition.

    ``difference`` is the mean over seeds of the test score of ``method`` minus the test score of
    ``other``. ``low`` and ``high`` bound its 95 % interval, and ``p`` is the two-sided p-value.
    Both come from the paired t-test (:func:`scipy.stats.ttest_rel`). ``p_holm`` is the p-value with
    Holm's correction over all pairs of the table. A pair with a single common seed, or with equal
    differences on all seeds, has no interval and no p-value. A pair without common seeds is left
    out. Where a sweep adds seeds until its differences are decided, the t-test would be wrong too
    often. Its pairs then have the numbers of the sweep, once it has stopped, with intervals that
    are corrected for looking, and no p-value. Other pairs are not tested.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metric: The score.
        score: ``last`` round, or round ``picked`` on validation data. Default: as in a report, see
            :func:`default_score`.
        against: Compare with this method only. Default: all pairs.

    Returns:
        One row per pair, with the columns ``partition, method, other, seeds, difference, low, high,
        p, p_holm, differs``. ``differs`` is whether the test finds a difference, at 5 % with Holm's
        correction. ``attrs["looked"]`` is whether a sweep adds seeds.

    Raises:
        FlsuiteError: If the score or method does not exist.
    """
    scores = seed_scores(results, metric, score)
    methods = list(dict.fromkeys(scores["method"]))
    if against is not None and against not in methods:
        raise FlsuiteError(
            f"compare: there is no method {against!r}; there are {', '.join(methods)}"
        )

    pairs = list(itertools.combinations(methods, 2))
    if against is not None:
        pairs = [(method, against) for method in methods if method != against]
    has_looked = any(decisions_of(run) is not None for run in scores["run"])
    # A sweep decides on the score by which methods are compared.
    is_decided = has_looked and score in (None, default_score(results, metric)[0])
    rows = []
    for partition, of_partition in scores.groupby("partition", sort=False):
        runs = of_partition.groupby("method")["run"].first().to_dict()
        by_seed = of_partition.pivot_table(index="seed", columns="method", values="value")
        by_seed = by_seed.reindex(columns=methods)
        for method, other in pairs:
            both = by_seed[[method, other]].dropna()
            if not len(both):
                continue
            numbers = paired(both[method].to_numpy(), both[other].to_numpy())
            own: tuple[float, ...] = len(both), *numbers, False
            if has_looked:
                own = len(both), numbers[0], math.nan, math.nan, math.nan, False
            if is_decided:
                own = _decision(runs, method, other, metric) or own
            rows.append((partition, method, other, *own))
    columns = ["partition", "method", "other", "seeds", "difference", "low", "high", "p", "differs"]
    table = pd.DataFrame(rows, columns=columns)
    table.insert(8, "p_holm", holm(table["p"].to_numpy(dtype=float)))
    table["differs"] = table["differs"].astype(bool) | (table["p_holm"] < LEVEL)
    table.attrs["looked"] = has_looked
    return table


def _decision(
    runs: Mapping[Any, str], method: str, other: str, metric: str
) -> tuple[float, ...] | None:
    """Return what a sweep has decided on a pair: the columns after ``other``, without ``p_holm``.

    Args:
        runs: A run of each method.
        method: The method.
        other: The method that is subtracted.
        metric: The score.
    """
    for own, baseline, sign in ((method, other, 1), (other, method, -1)):
        place = Path(runs[own]).parent.name, metric, baseline
        for decision in decisions_of(runs[own]) or ():
            if (decision.folder, decision.metric, decision.baseline) == place:
                look = decision.look
                low, high = sorted((sign * look.low, sign * look.high))
                mean, differs = sign * look.difference, look.because == "zero"
                return look.seeds, mean, low, high, math.nan, differs
    return None


def seed_scores(results: pd.DataFrame, metric: str, score: Score | None) -> pd.DataFrame:
    """Return one test score per run: columns ``run, method, partition, seed, value``.

    The arguments are the same as for :func:`compare`. Runs without the score are left out.
    """
    default, monitor = default_score(results, metric)
    score = score or default
    require_one_of("compare", get_args(Score), score=score)
    rows, names = [], ["run", "method", "partition", "seed"]
    for table in run_tables(results):
        scores = run_scores(table, metric, monitor, last=1)
        if score in scores:
            rows.append((*table[names].iloc[0], scores[score]))
    if not rows:
        raise FlsuiteError(
            f"compare: no run has validation scores of {monitor!r} to pick a round by; compare the "
            "last rounds"
        )
    return pd.DataFrame(rows, columns=[*names, "value"])


def default_score(results: pd.DataFrame, metric: str) -> tuple[Score, str]:
    """Return the score by which methods are compared, and the monitor that picks a round.

    Methods are compared in the round picked on validation data if all runs have one and use the
    same monitor. Otherwise they are compared in the last round.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metric: The score.
    """
    compared = only(results, metric)["run"].unique()
    known = results.attrs.get("monitors", {})
    monitors = sorted({known.get(run, "accuracy") for run in compared})
    scores = [run_scores(table, metric, monitors[0], last=1) for table in run_tables(results)]
    are_picked = len(monitors) == 1 and all("picked" in row for row in scores if row)
    return ("picked" if are_picked else "last"), monitors[0]


def paired(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float, float]:
    """Return the mean difference, its 95 % interval and the p-value of the paired t-test.

    Interval and p-value are NaN for a single pair. They are also NaN if all differences are equal,
    because a few equal ones say nothing about their spread.
    """
    from scipy.stats import ttest_rel

    with np.errstate(invalid="ignore", over="ignore"):  # infinite or huge losses
        differences = ours - theirs
        difference = float(np.mean(differences))
        spread = float(np.var(differences))
        if (
            len(ours) < 2
            or not math.isfinite(spread)
            or np.ptp(differences) <= 1e-12 * np.abs([ours, theirs]).max()
        ):
            return difference, math.nan, math.nan, math.nan
    test = ttest_rel(ours, theirs)
    interval = test.confidence_interval(0.95)
    return difference, float(interval.low), float(interval.high), float(test.pvalue)


def holm(p_values: np.ndarray) -> np.ndarray:
    """Return p-values with Holm's step-down correction.

    Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure. The k-th smallest of m
    p-values is multiplied by m + 1 - k, and the results are made non-decreasing. NaN stays NaN and
    is not counted.
    """
    adjusted = np.full(len(p_values), np.nan)
    order = np.argsort(p_values, kind="stable")[: int(np.isfinite(p_values).sum())]
    factors = len(order) - np.arange(len(order))
    adjusted[order] = np.maximum.accumulate(p_values[order] * factors).clip(max=1.0)
    return adjusted


def comparison_note(table: pd.DataFrame, metric: str, score: Score) -> str:
    """Return a note on how to read the numbers of :func:`compare`."""
    place = {
        "last": "of the last round",
        "picked": "of the round picked on validation data",
    }[score]
    seeds = int(table["seeds"].max()) if len(table) else 0
    metric = shown_score(metric)
    if seeds < 2:
        return f"Test {metric} {place}. Intervals and p-values need two common seeds per pair."
    if table.attrs.get("looked"):
        return (
            f"Test {metric} {place}: mean difference over common seeds, and the interval of the "
            "pairs on which the sweep has decided, corrected for looking after every seed. Other "
            "pairs are not tested, because the t-test does not know that seeds were added."
        )
    pairs = int(table["p"].notna().sum())
    if not pairs:
        return (
            f"Test {metric} {place}: mean difference over common seeds. The differences of "
            "all seeds are equal, or one is not finite, so that there are no p-values."
        )
    note = (
        f"Test {metric} {place}: mean difference over common seeds, 95 % interval and p-value of "
        f"the paired t-test, and p-value with Holm's correction over {pairs} "
        f"{'pair' if pairs == 1 else 'pairs'}."
    )
    floor = 2 / 2**seeds  # there are only 2**seeds ways to choose the signs of the differences
    return (
        f"{note} The t-test assumes normal differences. With {seeds} seeds, tests without "
        f"that assumption (Wilcoxon, sign-flip) cannot go below p = {floor:.4g}."
    )


PAIR_HEADINGS = ("difference of", "seeds", "mean", "95 % interval", "p", "p (Holm)")


def pair_cells(table: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the pairs of :func:`compare` as texts, in the order of ``PAIR_HEADINGS``.

    A pair without an interval or a p-value has an empty text there. Where the difference is the
    same in all seeds, which leaves nothing to test, the texts say so.
    """
    cells = []
    for row in table.to_dict("records"):
        interval, none = "", ""
        if not np.isnan(row["low"]):
            interval = " to ".join(shown_number(row[end], sign="+") for end in ("low", "high"))
        elif row["seeds"] > 1 and math.isfinite(row["difference"]) and not table.attrs["looked"]:
            interval, none = "same in all seeds", "-"
        cells.append(
            (
                f"{row['method']} - {row['other']}",
                f"{row['seeds']}",
                shown_number(row["difference"], sign="+"),
                interval,
                *(
                    none if np.isnan(p) else "<0.0001" if p < 1e-4 else f"{p:.4f}"
                    for p in (row["p"], row["p_holm"])
                ),
            )
        )
    return cells


def comparison_markdown(table: pd.DataFrame, metric: str, score: Score) -> str:
    """Return the pairs of :func:`compare` as Markdown, with :func:`comparison_note`.

    It is empty if no two methods share two seeds.
    """
    if not (table["seeds"] > 1).any():
        return ""
    parts = [comparison_note(table, metric, score)]
    for partition, own in table.groupby("partition", sort=False):
        title = f"{partition}:\n\n" if table["partition"].nunique() > 1 else ""
        parts.append(title + markdown_table(PAIR_HEADINGS, pair_cells(own)))
    return "\n\n".join(parts)
