"""A table of scores for a paper, in LaTeX with booktabs."""

from collections.abc import Mapping, Sequence

import pandas as pd

from flsuite.analysis.comparison import LEVEL, Score, compare, default_score, seed_scores
from flsuite.analysis.report import mean_and_spread
from flsuite.common.score_names import lower_is_better, shown_number, shown_score

_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)
_PLACES: dict[Score, str] = {
    "last": "in the last round",
    "picked": "in the round picked on validation data",
}
_MARKS = {"*": "$^{*}$", "dagger": r"$^{\dagger}$"}
_PLUS_MINUS = r" \pm "


def latex_table(
    results: pd.DataFrame, metrics: Sequence[str] = ("accuracy",), against: str | None = None
) -> str:
    r"""Return the test scores as a table for LaTeX. Its document needs ``\usepackage{booktabs}``.

    Rows are methods, the baseline first, and columns are metrics and partitions. A cell is
    ``mean ± standard deviation`` over seeds. The best mean of a column is bold. A star marks a
    difference from the baseline, by :func:`~flsuite.analysis.compare` over all methods and
    partitions of the metric. Where there are tests, a dagger marks a score that has none.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metrics: Names of test scores.
        against: The baseline. Default: the first method, which is the first one of a sweep's file.

    Raises:
        FlsuiteError: If a score or the baseline does not exist.
    """
    metrics = [metrics] if isinstance(metrics, str) else metrics
    are_picked = all(default_score(results, metric)[0] == "picked" for metric in metrics)
    score: Score = "picked" if are_picked else "last"
    scores = {metric: seed_scores(results, metric, score) for metric in metrics}
    baseline = str(scores[metrics[0]]["method"].iloc[0]) if against is None else against
    tests = {}
    for metric, of_seeds in scores.items():
        has_baseline = against is not None or baseline in set(of_seeds["method"])
        own = compare(results, metric, score, baseline if has_baseline else None)
        tests[metric] = own[own["other"] == baseline]
    has_tests = any(own["low"].notna().any() for own in tests.values())
    columns, seeds = {}, set[int]()
    for metric, of_seeds in scores.items():
        for partition, rows in of_seeds.groupby("partition", sort=False):
            own = tests[metric][tests[metric]["partition"] == partition].set_index("method")
            marks = dict.fromkeys(set(rows["method"]) - {baseline}, "dagger") if has_tests else {}
            marks |= dict.fromkeys(own.index[own["low"].notna()], "")
            marks |= dict.fromkeys(own.index[own["differs"]], "*")
            columns[shown_score(metric), str(partition)] = _column(rows, metric, marks)
            seeds |= set(rows.groupby("method").size())
    table = pd.DataFrame(columns)
    table = table.loc[[baseline, *table.index.drop(baseline)]].fillna("--")

    has_looked = any(own.attrs["looked"] for own in tests.values())
    caption = _caption([*map(shown_score, metrics)], score, seeds, len(table))
    caption += _legend(table, _escaped(baseline), has_looked) if has_tests else ""
    single = [level for level in (0, 1) if table.columns.get_level_values(level).nunique() == 1]
    table.columns = table.columns.droplevel(single[-1:])
    table = table.rename(index=_escaped, columns=_escaped)
    return table.to_latex(
        escape=False,
        caption=caption,
        label="tab:scores",
        position="t",
        column_format="l" + "c" * table.shape[1],
        multicolumn_format="c",
    )


def _column(rows: pd.DataFrame, metric: str, marks: Mapping[str, str]) -> pd.Series:
    """Return the cells of a column by method."""
    lower, values = lower_is_better(metric), rows.groupby("method", sort=False)["value"]
    statistics = {str(method): mean_and_spread(own) for method, own in values}
    means = [mean for mean, _ in statistics.values() if not pd.isna(mean)]
    best = None if lower is None or len(means) < 2 else min(means) if lower else max(means)
    cells = {}
    for method, (mean, spread) in statistics.items():
        if pd.isna(mean):  # a seed has no score
            cells[method] = "--"
            continue
        number, *rest = (_number(n) for n in (mean, spread) if not pd.isna(n))
        shown = rf"\mathbf{{{number}}}" if mean == best else number
        # The mark takes no room, so that the numbers stay below each other.
        mark = rf"\rlap{{{_MARKS[own]}}}" if (own := marks.get(method)) else ""
        cells[method] = f"${_PLUS_MINUS.join([shown, *rest])}${mark}"
    return pd.Series(cells)


def _number(value: float) -> str:
    """Return a number as LaTeX."""
    digits, e, power = shown_number(value, 3).partition("e")
    digits = digits.replace("inf", r"\infty")
    return rf"{digits} \times 10^{{{int(power)}}}" if e else digits


def _caption(metrics: Sequence[str], score: Score, seeds: set[int], methods: int) -> str:
    """Return what the cells are, as LaTeX."""
    names = _escaped(" and ".join(metrics))
    number = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    what = rf"mean $\pm$ standard deviation over {number} seeds" if seeds != {1} else "one seed"
    best = " Bold: the best mean." if methods > 1 else ""
    return f"Test {names} {_PLACES[score]}: {what}.{best}"


def _legend(table: pd.DataFrame, baseline: str, has_looked: bool) -> str:
    """Return what the marks are that the cells have, as LaTeX."""
    test = rf"$p < {LEVEL}$, paired $t$-test over common seeds with Holm's correction over the "
    test += f"comparisons with {baseline}"
    why = "for lack of common seeds, or of a spread"
    if has_looked:
        test = "paired intervals after every seed, corrected by Pocock-type alpha spending"
        why = "because seeds were added until other differences were decided"
    meanings = {
        "*": f"differs from {baseline} ({test})",
        "dagger": f"not tested against {baseline}, {why}",
    }
    cells = table.to_numpy().ravel().tolist()
    # The star also says which test was made, if it has found nothing.
    have = [name for name, mark in _MARKS.items() if name == "*" or any(mark in c for c in cells)]
    return "".join(f" {_MARKS[name]}: {meanings[name]}." for name in have)


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL)
