"""Parts of the charts of a page."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from flsuite.analysis.panels import AXES
from flsuite.analysis.publish.page.data import PageData

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
