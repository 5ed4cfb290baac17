"""The tables of the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flsuite.analysis.axes import AXES
from flsuite.analysis.comparison import Score, shown_interval, shown_p
from flsuite.analysis.groups import Group
from flsuite.analysis.labels import differing, shown_value
from flsuite.analysis.report import group_row, score_cell
from flsuite.analysis.runs import lower_is_better
from flsuite.analysis.target import amount_cell, reached_text, target_table


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What is shown.
        value: The number that it is sorted by. ``None`` sorts by the text.
        bar: How full a bar behind a number is, in percent. ``None`` draws none.
        is_best: Whether it is the best of its column and partition.
        link: The anchor that it leads to.
    """

    text: str
    value: float | None = None
    bar: float | None = None
    is_best: bool = False
    link: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        name: Its name among others in its place.
        heads: Headings.
        rows: Cells.
        words: How many columns hold words, from the left. The others hold numbers.
    """

    name: str
    heads: list[str]
    rows: list[list[Cell]]
    words: int = 2


def facts(results: pd.DataFrame) -> list[tuple[str, str]]:
    """Return what the report is about, as numbers with their names."""
    counts = {name: results[name].nunique() for name in ("run", "method", "partition", "seed")}
    pairs = [(f"{count}", name if count == 1 else f"{name}s") for name, count in counts.items()]
    hours = results.groupby("run", observed=True)["wall_s"].max().sum() / 3600
    spent = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
    return [*pairs, (f"{results['round'].max()}", "rounds"), (spent, "of computing")]


def headline(groups: Sequence[Group], metric: str, score: Score) -> list[str]:
    """Return a sentence per partition on the method with the best mean."""
    lower = lower_is_better(metric)
    if lower is None:
        return []
    lines = []
    for partition in dict.fromkeys(group.partition for group in groups):
        rows = {
            group.method: row
            for group in groups
            if group.partition == partition and (row := group_row(group, metric, 1))
        }
        means = {
            name: row[score]
            for name, row in rows.items()
            if not math.isnan(row.get(score, math.nan))
        }
        if len(means) > 1:
            best = (min if lower else max)(means, key=lambda name: means[name])
            shown = score_cell(rows[best], score)
            lines.append(f"{best} has the best mean {metric} on {partition}: {shown}")
    return lines


def scores(groups: Sequence[Group], metric: str, last: int) -> Table:
    """Return the scores of each experiment, and what it cost."""
    heads = {"last": "last round", "picked": "picked on validation"}
    heads |= {"mean_last": f"mean of last {last}", "best_on_test": "best on test *"}
    rows = [(n, g, row) for n, g in enumerate(groups) if (row := group_row(g, metric, last))]
    shown = [name for name in heads if any(name in row for _, _, row in rows)]
    cells = []
    for n, group, row in rows:
        names = [
            Cell(group.method, link=f"run-{n}"),
            Cell(group.partition),
            Cell(f"{row['runs']}", row["runs"]),
        ]
        peers = [other for _, peer, other in rows if peer.partition == group.partition]
        numbers = [_score_cell(row, name, peers, metric) for name in shown]
        cells.append([*names, *numbers, *_costs(group)])
    titles = [heads[name] for name in shown]
    return Table(metric, ["method", "partition", "runs", *titles, "seconds", "MB"], cells)


def targets(results: pd.DataFrame, target: float, metric: str, split: str) -> Table:
    """Return how soon each experiment reaches the target, on every axis."""
    table = target_table(results, target, metric, split)
    axes = [x for x in AXES if x in table]
    rows = []
    for row in table.to_dict("records"):
        reached = reached_text(row["reached"], row["runs"])
        cells = [Cell(row["method"]), Cell(row["partition"])]
        cells += [Cell(amount_cell(row, x), _known(row[x])) for x in axes]
        rows.append([*cells, Cell(reached, row["reached"] / row["runs"])])
    return Table("target", ["method", "partition", *(AXES[x].unit for x in axes), "runs"], rows)


def pairs(table: pd.DataFrame) -> Table:
    """Return the paired comparison."""
    heads = [
        "method",
        "other",
        "partition",
        "seeds",
        "difference",
        "95 % interval",
        "p",
        "p (Holm)",
    ]
    rows = [
        [
            Cell(row["method"]),
            Cell(row["other"]),
            Cell(row["partition"]),
            Cell(f"{row['seeds']}", row["seeds"]),
            Cell(f"{row['difference']:+.4f}", _known(row["difference"])),
            Cell(shown_interval(row["low"], row["high"]), _known(row["low"])),
            Cell(shown_p(row["p"]), _known(row["p"])),
            Cell(shown_p(row["p_holm"]), _known(row["p_holm"]), is_best=row["p_holm"] < 0.05),
        ]
        for row in table.to_dict("records")
    ]
    return Table("pairs", heads, rows, words=3)


def settings(groups: Sequence[Group]) -> Table | None:
    """Return the settings in which the experiments differ."""
    keys = differing([group.settings for group in groups])
    if not keys:
        return None
    rows = [
        [
            Cell(group.method, link=f"run-{n}"),
            Cell(group.partition),
            *(Cell(shown_value(group.settings.get(key))) for key in keys),
        ]
        for n, group in enumerate(groups)
    ]
    return Table("settings", ["method", "partition", *keys], rows, words=2 + len(keys))


def tuning(table: pd.DataFrame) -> Table:
    """Return the trials of each method, and what was chosen."""
    rows = [
        [
            Cell(row["method"]),
            Cell(row["grid point"]),
            Cell(row["values"]),
            Cell(f"{row['trials']}", row["trials"]),
            Cell(row["score"], _number(row["score"])),
        ]
        for row in table.to_dict("records")
    ]
    return Table(
        "tuning", ["method", "grid point", "chosen", "trials", "validation score"], rows, 3
    )


def _score_cell(
    row: dict[str, Any], name: str, peers: Sequence[dict[str, Any]], metric: str
) -> Cell:
    value = row.get(name, math.nan)
    if math.isnan(value):
        return Cell("")
    values = [peer[name] for peer in peers if not math.isnan(peer.get(name, math.nan))]
    lower = lower_is_better(metric)
    is_best = len(values) > 1 and lower is not None and value == (min if lower else max)(values)
    bar = 100 * value if 0 <= value <= 1 else None
    return Cell(score_cell(row, name), value, bar, is_best)


def _costs(group: Group) -> list[Cell]:
    """Return the mean seconds and bytes of a group's runs."""
    cells = []
    for x in ("wall_s", "bytes"):
        value = float(pd.Series([table[x].max() for table in group.runs.values()]).mean())
        cells.append(Cell("") if math.isnan(value) else Cell(AXES[x].number(value), value))
    return cells


def _known(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
