"""Parts of a page, and its headline."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from flsuite.analysis.comparison import Score
from flsuite.analysis.groups import Group
from flsuite.analysis.panels import AXES
from flsuite.analysis.publish.page.data import PageData
from flsuite.analysis.report import group_row, score_cell
from flsuite.common.score_names import lower_is_better

COLORS = (
    "#3b7dd8",
    "#e8833a",
    "#2fa37c",
    "#c8506b",
    "#8a6fd1",
    "#b59a2b",
    "#3fa7b8",
    "#d478b4",
    "#7a8c3c",
    "#9a7462",
)
"""Colors that are distinguishable on white and on black."""

GREY = "#8b939c"
_FEW = "ceil(width / 90)"
"""Number of labels that fit on an axis, as a Vega expression."""
_COMPUTED = "expression: "
"""Prefix of axis titles that are expressions. Vega accepts these, but the schema does not."""


def with_titles(node: Any) -> Any:
    """Return a specification with its computed titles as expressions."""
    match node:
        case list():
            return [with_titles(item) for item in node]
        case dict():
            return {key: with_titles(value) for key, value in node.items()}
        case str() if node.startswith(_COMPUTED):
            return {"expr": node.removeprefix(_COMPUTED)}
    return node


def of_partition(frame: pd.DataFrame, condition: str = "") -> alt.Chart:
    """Return a chart of the rows in the chosen partition that also meet the condition."""
    conditions = filter(None, ["datum.partition === partition", condition])
    return alt.Chart(inline(frame)).transform_filter(" && ".join(conditions))


def inline(frame: pd.DataFrame) -> alt.InlineData:
    """Return a table as CSV, which is a third of the size of its JSON."""
    kinds = {
        str(name): "number" if pd.api.types.is_numeric_dtype(frame[name]) else "string"
        for name in frame
    }
    text = frame.to_csv(index=False, float_format="%.4g")
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=kinds))


def menu_of(
    name: str, title: str, options: Sequence[str], labels: Sequence[str] = (), chosen: str = ""
) -> alt.Parameter:
    bind = alt.binding_select(
        options=list(options), labels=list(labels or options), name=f"{title} "
    )
    return alt.param(name=name, value=chosen or options[0], bind=bind)


def method_color(
    data: PageData, legend_of: pd.DataFrame | None = None, menus: Sequence[str] = ()
) -> alt.Color:
    """Return the color of each method.

    Args:
        data: Holds all methods.
        legend_of: The table that is drawn. The legend shows the methods in view, which depend on
            the partition's menu. ``None`` draws no legend.
        menus: Columns of the table with a menu of the same name, which also affects the legend.
    """
    legend: alt.Legend | None = None
    if legend_of is not None:
        keys = ["partition", *menus]
        seen = {
            "|".join(map(str, place)): in_order(data.methods, own["method"])
            for place, own in legend_of.groupby(keys, sort=False)
        }
        choice = " + '|' + ".join(keys)
        values = alt.ExprRef(f"{of_choice(choice, seen)} || []")
        legend = alt.Legend(
            symbolOpacity=1, symbolType="circle", symbolStrokeWidth=0, values=values
        )
    colors = [COLORS[n % len(COLORS)] for n in range(len(data.methods))]
    scale = alt.Scale(domain=data.methods, range=colors)
    return alt.Color("method:N", title=None, scale=scale, legend=legend)


def of_choice(choice: str, texts: Mapping[str, Any]) -> str:
    """Return a Vega expression that looks up the text for the choices of menus."""
    return f"({json.dumps(texts)})[{choice}]"


def in_order(names: Sequence[str], column: pd.Series) -> list[str]:
    """Return the names that a column contains."""
    return [name for name in names if name in set(column)]


def computed(choice: str, titles: Mapping[str, str]) -> str:
    """Return the title for the choice of a menu."""
    return _COMPUTED + of_choice(choice, titles)


def few_ticks(title: Any = alt.Undefined, count: str = _FEW) -> alt.Axis:
    """Return an axis whose number of labels follows the width of the chart."""
    return alt.Axis(title=title, tickCount=alt.ExprRef(count))


def chosen_axis(axes: Sequence[str]) -> alt.Axis:
    """Return the axis that the menu ``axis`` has chosen.

    If all its values are whole, its labels are whole too. Vega rounds the distance between ticks to
    0.5 where it is below 0.71.
    """
    title = computed("axis", {name: AXES[name].label for name in axes})
    whole = of_choice("axis", {name: AXES[name].is_whole for name in axes})
    most = f"({whole} ? max(1, floor(span(domain('x')) / 0.71)) : 100)"
    return few_ticks(title, f"min({_FEW}, {most})")


def row_axis() -> alt.Axis:
    return alt.Axis(labelLimit=170, labelPadding=8, ticks=False, domain=False)


def rows_height(rows: Sequence[str]) -> int:
    return 40 + 34 * len(rows)


def unique(column: pd.Series) -> list[str]:
    return [str(value) for value in dict.fromkeys(column)]


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
