"""The page's headline: which method has the best mean, and which methods it is ahead of."""

import math
from collections.abc import Sequence

import pandas as pd

from flsuite.analysis.comparison import Score
from flsuite.analysis.groups import Group
from flsuite.analysis.report import group_row, score_cell
from flsuite.common.score_names import lower_is_better

_MOST_NAMES = 3
_SIGNIFICANT = 0.05


def headline(groups: Sequence[Group], pairs: pd.DataFrame, metric: str, score: Score) -> list[str]:
    """Return a sentence per partition on the method with the best mean.

    It is ahead of another method if the p-value of their difference is below 0.05, with Holm's
    correction over all pairs.

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
    p_values = {name: _p_value(best, name, pairs) for name in others}
    if all(p is None for p in p_values.values()):
        return f"{shown[best]} has the best {what}; to say that it is ahead takes two common seeds"
    known = {name: p for name, p in p_values.items() if p is not None}
    ahead = [name for name, p in known.items() if p < _SIGNIFICANT]
    same = [name for name, p in known.items() if math.isnan(p)]
    level = [name for name in known if name not in (*ahead, *same)]
    single = [name for name in others if name not in known]
    parts = [f"{shown[best]} has the best mean {what}"]
    parts += [f"ahead of {_listed(ahead, shown)}"] if ahead else []
    parts += [f"these seeds do not tell it from {_listed(level, shown)}"] if level else []
    parts += [f"the same difference on all seeds from {_listed(same, shown)}"] if same else []
    parts += [f"too few common seeds to compare {_listed(single, shown)}"] if single else []
    return "; ".join(parts)


def _p_value(best: str, other: str, pairs: pd.DataFrame) -> float | None:
    """Return the corrected p-value of a difference, or ``None`` without two common seeds.

    It is 1 if the methods have equal scores, and NaN if their difference is the same on all seeds.
    """
    names = pairs[["method", "other"]].apply(frozenset, axis=1)
    for row in pairs[names == {best, other}].to_dict("records"):
        if row["seeds"] > 1:
            return float(row["p_holm"]) if row["difference"] else 1.0
    return None


def _listed(names: Sequence[str], shown: dict[str, str]) -> str:
    """Return methods with their scores as text, at most the first three."""
    texts = [shown[name] for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        texts.append(f"{len(names) - _MOST_NAMES} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
