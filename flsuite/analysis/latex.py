"""A table of scores for a paper, in LaTeX with booktabs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from flsuite.analysis.comparison import Score, compare, default_score, seed_scores
from flsuite.analysis.report import score_cell
from flsuite.common.score_names import lower_is_better, shown_score
from flsuite.runs.record import read_sweep_record

_SPECIAL = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)
_PLACES: dict[Score, str] = {
    "last": "in the last round",
    "picked": "in the round picked on validation data",
}
_LEVEL = 0.05
_PLUS_MINUS = r" \pm "


def latex_table(
    results: pd.DataFrame, metrics: Sequence[str] = ("accuracy",), against: str | None = None
) -> str:
    r"""Return the test scores as a table for LaTeX. Its document needs ``\usepackage{booktabs}``.

    Rows are methods, the baseline first, and columns are metrics and partitions. A cell is
    ``mean ± standard deviation`` over seeds. The best mean of a column is bold. A star marks a
    difference from the baseline with ``p < 0.05`` in the paired t-test, with Holm's correction over
    all methods and partitions of the metric. Where a sweep has added seeds until it was decided,
    a star marks what it has decided, because the t-test is not corrected for looking.

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
    columns, seeds = {}, set[int]()
    for metric in metrics:
        of_seeds = seed_scores(results, metric, score)
        baseline = str(of_seeds["method"].iloc[0]) if against is None else against
        tests = compare(results, metric, score, baseline)
        for partition, rows in of_seeds.groupby("partition", sort=False):
            of_column = tests[(tests["partition"] == partition) & (tests["p_holm"] < _LEVEL)]
            marked = _as_decided(set(of_column["method"]), rows, metric, baseline)
            columns[shown_score(metric), str(partition)] = _column(rows, metric, marked)
            seeds |= set(rows.groupby("method").size())
    table = pd.DataFrame(columns)
    table = table.loc[[baseline, *table.index.drop(baseline)]].fillna("--")

    has_looked = any(map(_stopping_of, results["run"].unique()))
    caption = _caption([*map(shown_score, metrics)], score, seeds, _escaped(baseline), has_looked)
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


def _column(rows: pd.DataFrame, metric: str, marked: set[str]) -> pd.Series:
    """Return the cells of a column by method."""
    values = rows.groupby("method", sort=False)["value"]
    # A seed without a score has no mean either.
    means, spreads = values.agg(lambda own: own.mean(skipna=False)), values.std()
    lower = lower_is_better(metric)
    best = None if lower is None else means.min() if lower else means.max()
    cells = {}
    for method, mean, spread in zip(means.index, means, spreads, strict=True):
        if pd.isna(mean):
            cells[method] = "--"
            continue
        number, *rest = score_cell({"m": mean, "m_std": spread}, "m").split(" ± ")
        shown = rf"\mathbf{{{number}}}" if mean == best else number
        # The star takes no room, so that the numbers stay below each other.
        star = r"\rlap{$^{*}$}" if method in marked else ""
        cells[method] = f"${_PLUS_MINUS.join([shown, *rest])}${star}"
    return pd.Series(cells)


def _as_decided(marked: set[str], rows: pd.DataFrame, metric: str, baseline: str) -> set[str]:
    """Return the marked methods. A sweep that has added seeds decides on its own methods."""
    runs = rows.groupby("method", sort=False)["run"].first()
    for method, run in runs.items():
        if until := _stopping_of(run):
            is_decided = any(
                (pair["folder"], pair["metric"], pair["baseline"], pair["look"]["because"])
                == (Path(run).parent.name, metric, baseline, "zero")
                for pair in until["pairs"]
            )
            marked = marked | {str(method)} if is_decided else marked - {str(method)}
    return marked


def _stopping_of(run: str) -> dict[str, Any]:
    """Return how the sweep of a run was stopped, or nothing if it has not added seeds."""
    return read_sweep_record(Path(run).parent.parent).get("until", {})


def _caption(
    metrics: Sequence[str], score: Score, seeds: set[int], baseline: str, has_looked: bool
) -> str:
    """Return what the cells are, as LaTeX."""
    names = _escaped(" and ".join(metrics))
    number = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    test = rf"$p < {_LEVEL}$, paired $t$-test over common seeds with Holm's correction over the "
    test += f"comparisons with {baseline}"
    if has_looked:
        test = "paired intervals after every seed, corrected by Pocock-type alpha spending"
    return (
        rf"Test {names} {_PLACES[score]}: mean $\pm$ standard deviation over {number} seeds. Bold: "
        rf"the best mean. $^{{*}}$: differs from {baseline} ({test})."
    )


def _escaped(text: str) -> str:
    return text.translate(_SPECIAL)
