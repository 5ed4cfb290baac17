"""The tables of the page, and its headline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from flsuite.analysis.comparison import PAIR_HEADINGS, Score, pair_cells
from flsuite.analysis.groups import Group, Variation
from flsuite.analysis.listing import own_models
from flsuite.analysis.panels import AXES
from flsuite.analysis.report import (
    amount_cell,
    averaged_scores,
    group_row,
    score_cell,
    target_table,
)
from flsuite.common.files import number_in
from flsuite.common.score_names import lower_is_better, shown_score


@dataclass(frozen=True)
class _Entry:
    """A cell of a table.

    Attributes:
        text: The text.
        value: The number to sort by. ``None`` sorts by the text.
        bar: Width of the bar below the number, in percent. ``None`` draws no bar.
        is_best: Whether it is the best in its column and partition.
        link: The anchor that the cell links to.
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
        heads: Column headings.
        rows: Cells.
        words: Number of text columns, from the left. The others hold numbers.
    """

    heads: list[str]
    rows: list[list[_Entry]]
    words: int = 2

    def short(self) -> "Table":
        """Return the table without its partitions if there is one alone, for narrow screens."""
        at = self.heads.index("partition")
        if len({row[at].text for row in self.rows}) > 1:
            return self
        rows = [[*row[:at], *row[at + 1 :]] for row in self.rows]
        return Table([head for head in self.heads if head != "partition"], rows, self.words - 1)


def facts(results: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the key figures of the report, as pairs of number and name."""
    counts = {name: results[name].nunique() for name in ("run", "method", "partition", "seed")}
    pairs = [(f"{count}", name if count == 1 else f"{name}s") for name, count in counts.items()]
    if counts["partition"] == 1:
        pairs[2] = (str(results["partition"].iloc[0]), "")
    seconds = float(results.groupby("run", observed=True)["wall_s"].max().sum())
    rounds = int(results["round"].max())
    pairs.append((f"{rounds}", "round" if rounds == 1 else "rounds"))
    return [*pairs, (_duration(seconds), "of computing")]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def scores(groups: Sequence[Group], metric: str, last: int, split: str) -> Table:
    """Return the scores of each experiment and their cost. A star marks one of many models."""
    averaged = averaged_scores(groups, metric, last)
    heads = {"last": "last round", "picked": "picked on validation"}
    heads |= {"mean_last": f"mean of the last\N{NO-BREAK SPACE}{averaged}"} if averaged > 1 else {}
    heads |= {"best_on_test": "best on test\N{NO-BREAK SPACE}†"}
    rows = [(n, g, row) for n, g in enumerate(groups) if (row := group_row(g, metric, averaged))]
    shown = [name for name in heads if any(name in row for _, _, row in rows)]
    # A full bar is the best possible score.
    values = [row[name] for _, _, row in rows for name in shown if name in row]
    has_bars = lower_is_better(metric) is False and min(values) >= 0 and max(values) <= 1
    marked = own_models(groups, [metric], split)
    cells = []
    for n, group, row in rows:
        star = "\N{NO-BREAK SPACE}*" if (group.label, metric) in marked else ""
        names = [
            _Entry(group.method + star, link=f"run-{n}"),
            _Entry(group.partition),
            _Entry(f"{row['runs']}", row["runs"]),
        ]
        peers = [other for _, peer, other in rows if peer.partition == group.partition]
        numbers = [_score_cell(row, name, peers, metric, has_bars) for name in shown]
        cells.append([*names, *numbers, *_costs(group)])
    titles = [heads[name] for name in shown]
    return Table(["method", "partition", "runs", *titles, "seconds", "MB"], cells)


def targets(results: pd.DataFrame, targets: Mapping[str, float], metric: str, split: str) -> Table:
    """Return when each experiment reaches its partition's target, on every axis."""
    tables = [
        target_table(results[results["partition"] == name], target, metric, split)
        for name, target in targets.items()
    ]
    rows = []
    for row in pd.concat(tables).to_dict("records"):
        target = targets[str(row["partition"])]
        names = [_Entry(row["method"]), _Entry(row["partition"]), _Entry(f"{target:.4g}", target)]
        amounts = [_Entry(amount_cell(row, x), _known(row[x])) for x in AXES]
        reached = _Entry(f"{row['reached']} of {row['runs']}", row["reached"] / row["runs"])
        rows.append([*names, *amounts, reached])
    units = [axis.unit for axis in AXES.values()]
    return Table(["method", "partition", "target", *units, "reached"], rows)


def pairs(table: pd.DataFrame) -> Table:
    """Return the paired comparison."""
    words, numbers = ("method", "other", "partition"), ("seeds", "difference", "low", "p", "p_holm")
    rows = []
    for row, (_, *texts) in zip(table.to_dict("records"), pair_cells(table), strict=True):
        cells = [_Entry(row[name]) for name in words]
        for name, text in zip(numbers, texts, strict=True):
            is_best = row["differs"] and name == ("low" if math.isnan(row["p"]) else "p_holm")
            cells.append(_Entry(text, _known(row[name]), is_best=is_best))
        rows.append(cells)
    return Table([*words, "seeds", "difference", *PAIR_HEADINGS[3:]], rows, words=3)


def settings(groups: Sequence[Group]) -> Table | None:
    """Return the settings in which the experiments differ, as one text per experiment."""
    if len(groups) < 2:
        return None
    variation = Variation([group.settings for group in groups])
    rows = [
        [
            _Entry(group.method, link=f"run-{n}"),
            _Entry(group.partition),
            _Entry(", ".join(variation.texts(group.settings))),
        ]
        for n, group in enumerate(groups)
    ]
    return Table(["method", "partition", "settings"], rows, words=3)


def tuning(table: pd.DataFrame) -> Table:
    """Return the trials of each method, and the chosen values."""
    rows = [
        [
            *(_Entry(row[name]) for name in ("method", "grid point", "values")),
            _Entry(f"{row['trials']}", row["trials"]),
            _Entry(row["score"], number_in(row["score"])),
        ]
        for row in table.to_dict("records")
    ]
    return Table(["method", "grid point", "chosen", "trials", "validation score"], rows, words=3)


def _score_cell(
    row: dict[str, Any], name: str, peers: Sequence[dict[str, Any]], metric: str, has_bar: bool
) -> _Entry:
    value = row.get(name, math.nan)
    if math.isnan(value):
        return _Entry("")
    values = [peer[name] for peer in peers if not math.isnan(peer.get(name, math.nan))]
    lower = lower_is_better(metric)
    is_best = len(values) > 1 and lower is not None and value == (min if lower else max)(values)
    return _Entry(score_cell(row, name), value, 100 * value if has_bar else None, is_best)


def _costs(group: Group) -> list[_Entry]:
    """Return the mean seconds and bytes of a group's runs."""
    cells = []
    for x in ("wall_s", "bytes"):
        value = float(pd.Series([table[x].max() for table in group.runs.values()]).mean())
        cells.append(_Entry("" if math.isnan(value) else AXES[x].number(value), _known(value)))
    return cells


def _known(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


_MOST_NAMES = 3


def headline(groups: Sequence[Group], pairs: pd.DataFrame, metric: str, score: Score) -> list[str]:
    """Return a sentence per partition on the method with the best mean.

    It is ahead of another method if the test finds a difference.

    Args:
        groups: The experiments.
        pairs: The table from :func:`~flsuite.analysis.compare`.
        metric: The score.
        score: Which of a run's scores is compared.
    """
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
        shown = {
            name: f"{name} ({score_cell(row, score)})"
            for name, row in rows.items()
            if not math.isnan(row.get(score, math.nan))
        }
        if len(shown) > 1:
            best = (min if lower else max)(shown, key=lambda name: rows[name][score])
            others = [name for name in shown if name != best]
            own = pairs[pairs["partition"] == partition]
            lines.append(
                _sentence(best, others, shown, own, f"{shown_score(metric)} on {partition}")
            )
    return lines


def _sentence(
    best: str, others: Sequence[str], shown: dict[str, str], pairs: pd.DataFrame, what: str
) -> str:
    tests = {name: _test(best, name, pairs) for name in others}
    known = {name: row for name, row in tests.items() if row["seeds"] > 1}
    if not known:
        return f"{shown[best]} has the best {what}; to say that it is ahead takes two common seeds"
    ahead = [name for name, row in known.items() if row["differs"]]
    same = [
        name
        for name, row in known.items()
        if row["difference"] and math.isnan(row["low"]) and not pairs.attrs.get("looked")
    ]
    level = [name for name in known if name not in (*ahead, *same)]
    single = [name for name in others if name not in known]
    parts = [f"{shown[best]} has the best mean {what}"]
    parts += [f"ahead of {_listed(ahead, shown)}"] if ahead else []
    parts += [f"these seeds do not tell it from {_listed(level, shown)}"] if level else []
    parts += [f"the same difference on all seeds from {_listed(same, shown)}"] if same else []
    parts += [f"too few common seeds to compare {_listed(single, shown)}"] if single else []
    return "; ".join(parts)


def _test(best: str, other: str, pairs: pd.DataFrame) -> dict[str, Any]:
    """Return the row of two methods in either order. Without one, they have no common seeds."""
    names = pairs[["method", "other"]].apply(frozenset, axis=1)
    rows = pairs[names == {best, other}].to_dict("records")
    return rows[0] if rows else {"seeds": 0}


def _listed(names: Sequence[str], shown: dict[str, str]) -> str:
    """Return methods with their scores as text, at most the first three."""
    texts = [shown[name] for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        texts.append(f"{len(names) - _MOST_NAMES} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
