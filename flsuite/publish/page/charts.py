"""The charts of the page, as Vega-Lite.

Each chart holds its own data, aggregated before, and all choices that its menus offer. The menu of
the partition is the page's: it sets the parameter ``partition`` of every chart.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from flsuite.analysis.axes import AXES
from flsuite.analysis.curves import GAMMA
from flsuite.publish.page.data import PageData

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
"""Colours that are told apart on white and on black."""

_GREY = "#8b939c"
_FEW = "ceil(width / 90)"
"""Labels that an axis has room for, as an expression of Vega."""


def charts(data: PageData) -> dict[str, dict[str, Any]]:
    """Return the specification of each chart for which there is data."""
    with alt.data_transformers.enable("default", max_rows=None):
        made = {
            "curves": _curves(data),
            "targets": _targets(data),
            "differences": _differences(data),
            "map": _client_map(data),
            "spread": _client_spread(data),
            "gains": _gains(data),
            "mix": _class_mix(data),
            "gamma": _gamma(data),
        }
        specs = {
            name: _with_titles(chart.to_dict()) for name, chart in made.items() if chart is not None
        }
    for spec in specs.values():
        spec.pop("$schema")  # an address, which the page does not need
        spec.pop("config", None)  # the page has a light and a dark one
    return specs


_COMPUTED = "expression: "
"""How the title of an axis begins that is an expression: Vega takes one, the schema does not."""


def _with_titles(node: Any) -> Any:
    """Return a specification with its computed titles as expressions."""
    if isinstance(node, list):
        return [_with_titles(item) for item in node]
    if isinstance(node, str) and node.startswith(_COMPUTED):
        return {"expr": node.removeprefix(_COMPUTED)}
    if isinstance(node, dict):
        return {key: _with_titles(value) for key, value in node.items()}
    return node


def _curves(data: PageData) -> alt.LayerChart | None:
    """Draw mean and range over seeds, with menus for the metric and the axis."""
    if data.curves.empty:
        return None
    names = _unique(data.curves["metric"])
    labels = [name.replace("_", " ") for name in names]
    return _lines(data, data.curves, "Score", names, labels, is_log=False)


def _gamma(data: PageData) -> alt.LayerChart | None:
    """Draw gamma and its parts, as far as they were logged."""
    if data.gamma.empty:
        return None
    names = _unique(data.gamma["metric"])
    labels = [GAMMA[name] for name in names]
    is_log = bool((data.gamma["low"] > 0).all())
    return _lines(data, data.gamma, "Number", names, labels, is_log)


def _lines(
    data: PageData,
    frame: pd.DataFrame,
    title: str,
    names: Sequence[str],
    labels: Sequence[str],
    is_log: bool,
) -> alt.LayerChart:
    menu = _menu("metric", title, names, labels)
    axes = _unique(frame["axis"])
    chosen = data.axis if data.axis in axes else axes[0]
    axis = _menu("axis", "over", axes, [AXES[name].label for name in axes], chosen)
    base = _of_partition(frame, "datum.metric === metric && datum.axis === axis")
    picked = alt.selection_point(fields=["method"], bind="legend")
    scale = alt.Scale(type="log", nice=False) if is_log else alt.Scale(zero=False)
    x = alt.X("x:Q", scale=alt.Scale(zero=False, nice=False), axis=_chosen_axis(axes))
    y_axis = alt.Axis(title=_computed("metric", dict(zip(names, labels, strict=True))))
    y = alt.Y("mean:Q", scale=scale, axis=y_axis)
    color = _color(data, frame, ("metric", "axis"))

    band = base.mark_area().encode(
        x=x,
        y=alt.Y("low:Q", scale=scale, axis=y_axis),
        y2="high:Q",
        color=color,
        opacity=alt.condition(picked, alt.value(0.16), alt.value(0.02)),
    )
    line = base.mark_line(strokeWidth=2, clip=True).encode(
        x=x,
        y=y,
        color=color,
        opacity=alt.condition(picked, alt.value(1), alt.value(0.12)),
    )
    # Single points are seen; the others only carry the tooltip.
    is_single = frame.groupby(["method", "partition", "metric", "axis"]).size().max() == 1
    dots = base.mark_circle(size=70, opacity=1 if is_single else 0).encode(
        x=x,
        y=y,
        color=color,
        tooltip=[
            alt.Tooltip("method:N"),
            alt.Tooltip("x:Q", format=",.4~g", title="at"),
            alt.Tooltip("mean:Q", format=".4~g"),
            alt.Tooltip("low:Q", format=".4~g", title="lowest"),
            alt.Tooltip("high:Q", format=".4~g", title="highest"),
        ],
    )
    chart = alt.layer(band, line, dots.add_params(picked))
    return chart.add_params(menu, axis, _partition(data)).properties(width="container", height=340)


def _targets(data: PageData) -> alt.LayerChart | None:
    """Draw where each run reaches the target, and the mean of those that do."""
    if data.targets.empty:
        return None
    axes = _unique(data.targets["axis"])
    chosen = data.axis if data.axis in axes else axes[0]
    axis = _menu("axis", "Axis", axes, [AXES[name].label for name in axes], chosen)
    base = _of_partition(data.targets, "datum.axis === axis")
    y = alt.Y("method:N", title=None, sort=data.methods, axis=_row_axis())
    x = alt.X("x:Q", scale=alt.Scale(zero=True), axis=_chosen_axis(axes))
    dots = base.mark_circle(size=75, opacity=0.6).encode(
        x=x,
        y=y,
        color=_color(data),
        tooltip=["method:N", "seed:N", alt.Tooltip("x:Q", format=",.4~g", title="reached at")],
    )
    mean = base.mark_tick(thickness=2.5, size=22).encode(
        x=alt.X("mean(x):Q", axis=_chosen_axis(axes)), y=y, color=_color(data)
    )
    # Where a run does not reach it, the row says so.
    counts = base.transform_aggregate(
        runs="count()", reached="valid(x)", groupby=["method"]
    ).transform_filter("datum.reached < datum.runs")
    notes = counts.transform_calculate(
        text="datum.reached + ' of ' + datum.runs + ' reach it'"
    ).mark_text(align="left", dx=8, color=_GREY)
    notes = notes.encode(x=alt.value(alt.ExprRef("width")), y=y, text="text:N")
    chart = alt.layer(dots, mean, notes).add_params(axis, _partition(data))
    return chart.properties(width="container", height=_rows_height(data.methods))


def _differences(data: PageData) -> alt.LayerChart | None:
    """Draw the mean difference of each pair with its interval."""
    frame = data.pairs.dropna(subset=["low", "high"])
    if frame.empty:
        return None
    verdicts = ["p < 0.05 after Holm", "not significant"]
    frame = frame.assign(
        pair=frame["method"] + " - " + frame["other"],
        verdict=[verdicts[0 if p < 0.05 else 1] for p in frame["p_holm"]],
    )
    base = _of_partition(frame[["partition", "pair", "verdict", *_INTERVAL]])
    y = alt.Y("pair:N", title=None, sort=_unique(frame["pair"]), axis=_row_axis())
    seen = {name: _unique(own["verdict"]) for name, own in frame.groupby("partition", sort=False)}
    color = alt.Color(
        "verdict:N",
        title=None,
        scale=alt.Scale(domain=verdicts, range=[COLORS[0], _GREY]),
        legend=alt.Legend(values=alt.ExprRef(f"{_of_choice('partition', seen)} || []")),
    )
    zero = alt.Chart(_inline(pd.DataFrame({"x": [0]}))).mark_rule(color=_GREY)
    title = f"difference in {data.score}"
    lines = base.mark_rule(strokeWidth=2.5).encode(
        x=alt.X("low:Q", title=title, axis=_few_ticks()), x2="high:Q", y=y, color=color
    )
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("difference:Q", title=title),
        y=y,
        color=color,
        tooltip=["pair:N", *(alt.Tooltip(f"{name}:Q", format=".4~f") for name in _INTERVAL)],
    )
    chart = alt.layer(zero.encode(x="x:Q"), lines, dots).add_params(_partition(data))
    return chart.properties(width="container", height=_rows_height(_unique(frame["pair"])))


_INTERVAL = ["difference", "low", "high", "p", "p_holm"]


def _client_map(data: PageData) -> alt.Chart | None:
    """Draw the clients' scores over the rounds of one run."""
    if data.client_rounds.empty:
        return None
    methods = _in_order(data.methods, data.client_rounds["method"])
    chart = _of_partition(data.client_rounds, "datum.method === method").mark_rect()
    encoded = chart.encode(
        x=alt.X("round:O", axis=alt.Axis(labelOverlap=True, labelAngle=0), title="round"),
        y=alt.Y("client:O", title="client", axis=alt.Axis(labelOverlap=True)),
        color=alt.Color(
            "value:Q",
            title=data.score,
            scale=alt.Scale(scheme="viridis"),
            legend=alt.Legend(orient="top"),
        ),
        tooltip=["client:O", "round:O", alt.Tooltip("value:Q", format=".3f")],
    )
    clients = data.client_rounds["client"].nunique()
    menu = _menu("method", "Method", methods)
    return encoded.add_params(menu, _partition(data)).properties(
        width="container", height=min(max(300, 14 * clients), 480)
    )


def _client_spread(data: PageData) -> alt.LayerChart | None:
    """Draw the last score of each client, and the mean of each method."""
    if data.clients.empty:
        return None
    base = _of_partition(data.clients)
    y = alt.Y("method:N", title=None, sort=data.methods, axis=_row_axis())
    x = alt.X("value:Q", title=data.score, scale=alt.Scale(zero=False), axis=_few_ticks())
    ticks = base.mark_tick(thickness=1.5, size=20, opacity=0.55).encode(
        x=x,
        y=y,
        color=_color(data),
        tooltip=["method:N", "client:N", "seed:N", alt.Tooltip("value:Q", format=".3f")],
    )
    mean = base.mark_point(filled=True, shape="diamond", size=130, opacity=1).encode(
        x=alt.X("mean(value):Q", title=data.score), y=y, color=_color(data)
    )
    chart = alt.layer(ticks, mean).add_params(_partition(data))
    return chart.properties(width="container", height=_rows_height(data.methods))


def _gains(data: PageData) -> alt.LayerChart | None:
    """Draw each client's score against the one that it reaches alone."""
    if data.gains.empty:
        return None
    values = data.gains[["alone", "score"]]
    low, high = float(values.min().min()), float(values.max().max())
    ends = pd.DataFrame({"alone": [low, high], "score": [low, high]})
    diagonal = alt.Chart(_inline(ends)).mark_line(color=_GREY, strokeWidth=1)
    scale = alt.Scale(domain=[low, high], nice=True)
    x = alt.X("alone:Q", title=f"{data.score} alone", scale=scale, axis=_few_ticks())
    y = alt.Y("score:Q", title=f"{data.score} in the federation", scale=scale)
    dots = _of_partition(data.gains).mark_circle(size=55, opacity=0.65)
    encoded = dots.encode(
        x=x,
        y=y,
        color=_color(data, data.gains),
        tooltip=["method:N", "client:N", "seed:N", *(f"{n}:Q" for n in ("alone", "score"))],
    )
    chart = alt.layer(diagonal.encode(x=x, y=y), encoded).add_params(_partition(data))
    return chart.properties(width="container", height=360)


def _class_mix(data: PageData) -> alt.Chart | None:
    """Draw the classes of each client as stacked bars."""
    if data.mix.empty:
        return None
    classes = _unique(data.mix["class"])
    chart = _of_partition(data.mix).mark_bar()
    encoded = chart.encode(
        x=alt.X("client:O", title="client", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("samples:Q", title="training samples"),
        color=alt.Color(
            "class:N",
            title="class",
            scale=alt.Scale(
                domain=classes, scheme="tableau10" if len(classes) <= 10 else "tableau20"
            ),
            legend=alt.Legend(symbolLimit=24) if len(classes) <= 24 else None,
        ),
        order=alt.Order("index:Q"),
        tooltip=["client:O", "class:N", "samples:Q"],
    )
    return encoded.add_params(_partition(data)).properties(width="container", height=260)


def _of_partition(frame: pd.DataFrame, condition: str = "") -> alt.Chart:
    conditions = ["datum.partition === partition", *([condition] if condition else [])]
    return alt.Chart(_inline(frame)).transform_filter(" && ".join(conditions))


def _inline(frame: pd.DataFrame) -> alt.InlineData:
    """Return a table as CSV, which is a third of the size of its JSON."""
    kinds = {
        str(name): "number" if pd.api.types.is_numeric_dtype(frame[name]) else "string"
        for name in frame
    }
    text = frame.to_csv(index=False, float_format="%.4g")
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=kinds))


def _menu(
    name: str, title: str, options: Sequence[str], labels: Sequence[str] = (), chosen: str = ""
) -> alt.Parameter:
    bind = alt.binding_select(
        options=list(options), labels=list(labels or options), name=f"{title} "
    )
    return alt.param(name=name, value=chosen or options[0], bind=bind)


def _partition(data: PageData) -> alt.Parameter:
    return alt.param(name="partition", value=data.partitions[0])


def _color(
    data: PageData, legend_of: pd.DataFrame | None = None, menus: Sequence[str] = ()
) -> alt.Color:
    """Return the colour of each method.

    Args:
        data: It has all methods.
        legend_of: The table that is drawn. The legend has the methods that are in view, which the
            menu of the partition decides. ``None`` makes no legend.
        menus: Columns of the table with a menu of their name, which decide it too.
    """
    legend: alt.Legend | None = None
    if legend_of is not None:
        keys = ["partition", *menus]
        seen = {
            "|".join(map(str, place)): _in_order(data.methods, own["method"])
            for place, own in legend_of.groupby(keys, sort=False)
        }
        values = alt.ExprRef(f"{_of_choice(_JOINED.join(keys), seen)} || []")
        legend = alt.Legend(
            symbolOpacity=1, symbolType="circle", symbolStrokeWidth=0, values=values
        )
    colors = [COLORS[n % len(COLORS)] for n in range(len(data.methods))]
    scale = alt.Scale(domain=data.methods, range=colors)
    return alt.Color("method:N", title=None, scale=scale, legend=legend)


_JOINED = " + '|' + "


def _of_choice(choice: str, texts: Mapping[str, Any]) -> str:
    """Return an expression of Vega: what belongs to the choices of menus."""
    return f"({json.dumps(texts)})[{choice}]"


def _in_order(names: Sequence[str], column: pd.Series) -> list[str]:
    """Return those of the names that a column has."""
    return [name for name in names if name in set(column)]


def _computed(choice: str, titles: Mapping[str, str]) -> str:
    """Return the title that belongs to the choice of a menu."""
    return _COMPUTED + _of_choice(choice, titles)


def _few_ticks(title: Any = alt.Undefined, count: str = _FEW) -> alt.Axis:
    """Return an axis whose number of labels follows the width of the chart."""
    return alt.Axis(title=title, tickCount=alt.ExprRef(count))


def _chosen_axis(axes: Sequence[str]) -> alt.Axis:
    """Return the axis that the menu ``axis`` has chosen, with whole numbers where only they occur.

    Vega rounds the distance of ticks to 0.5 where it is below 0.71.
    """
    title = _computed("axis", {name: AXES[name].label for name in axes})
    whole = _of_choice("axis", {name: AXES[name].is_whole for name in axes})
    most = f"({whole} ? max(1, floor(span(domain('x')) / 0.71)) : 100)"
    return _few_ticks(title, f"min({_FEW}, {most})")


def _row_axis() -> alt.Axis:
    return alt.Axis(labelLimit=170, labelPadding=8, ticks=False, domain=False)


def _rows_height(rows: Sequence[str]) -> int:
    return 40 + 34 * len(rows)


def _unique(column: pd.Series) -> list[str]:
    return [str(value) for value in dict.fromkeys(column)]
