"""The page's headline: which method is ahead, and which methods are level with it."""

import math
from collections.abc import Sequence

import pandas as pd

from flsuite.analysis.comparison import Score
from flsuite.analysis.groups import Group
from flsuite.analysis.report import group_row, score_cell
from flsuite.analysis.runs import lower_is_better


def headline(groups: Sequence[Group], pairs: pd.DataFrame, metric: str, score: Score) -> list[str]:
    """Return a sentence per partition on the method with the best mean.

    Another method is level with it if the 95 % interval of their difference contains zero.

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
            lines.append(_sentence(best, others, shown, own, f"{metric} on {partition}"))
    return lines


def _sentence(
    best: str, others: Sequence[str], shown: dict[str, str], pairs: pd.DataFrame, what: str
) -> str:
    verdicts = {name: _verdict(best, name, pairs) for name in others}
    level, ahead, single = (
        [name for name in others if verdicts[name] == verdict]
        for verdict in ("level", "ahead", "single")
    )
    if not (level or ahead):
        return f"{shown[best]} has the best {what}; to say that it is ahead takes two common seeds"
    if level:
        parts = [f"{shown[best]} is level with {_listed(level, shown)} in {what}"]
        parts += [f"ahead of {_listed(ahead, shown)}"] if ahead else []
    else:
        parts = [f"{shown[best]} has the best mean {what}"]
    parts += [f"too few common seeds to compare {_listed(single, shown)}"] if single else []
    return "; ".join(parts)


def _verdict(best: str, other: str, pairs: pd.DataFrame) -> str:
    """Return ``ahead`` or ``level`` for the best method, or ``single`` without enough seeds."""
    names = pairs[["method", "other"]].apply(frozenset, axis=1)
    for row in pairs[names == {best, other}].to_dict("records"):
        if row["seeds"] > 1:
            # Equal scores have an interval of zero width, or none.
            return "ahead" if row["low"] > 0 or row["high"] < 0 else "level"
    return "single"


_MOST_NAMES = 3


def _listed(names: Sequence[str], shown: dict[str, str]) -> str:
    """Return methods with their scores as text, at most the first three."""
    texts = [shown[name] for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        texts.append(f"{len(names) - _MOST_NAMES} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
