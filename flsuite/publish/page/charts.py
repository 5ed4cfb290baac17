"""The charts of the page, as Vega-Lite.

Each chart holds its own data, aggregated before, and all choices that its menus offer. The menu of
the partition is the page's: it sets the parameter ``partition`` of every chart.
"""

from collections.abc import Sequence
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
        specs = {name: chart.to_dict() for name, chart in made.items() if chart is not None}
    for spec in specs.values():
        spec.pop("$schema")  # an address, which the page does not need
        spec.pop("config", None)  # the page has a light and a dark one
    return specs


def _curves(data: PageData) -> alt.LayerChart | None:
    """Draw mean and range over seeds, with menus for the metric and the axis."""
    if data.curves.empty:
        return None
    menu = _menu("metric", "Score", _unique(data.curves["metric"]))
    return _lines(data, data.curves, menu, is_log=False)


def _gamma(data: PageData) -> alt.LayerChart | None:
    """Draw gamma and its parts, as far as they were logged."""
    if data.gamma.empty:
        return None
    names = _unique(data.gamma["metric"])
    menu = _menu("metric", "Number", names, [GAMMA[name] for name in names])
    return _lines(data, data.gamma, menu, is_log=bool((data.gamma["low"] > 0).all()))


def _lines(
    data: PageData, frame: pd.DataFrame, menu: alt.Parameter, is_log: bool
) -> alt.LayerChart:
    axes = _unique(frame["axis"])
    chosen = data.axis if data.axis in axes else axes[0]
    axis = _menu("axis", "over", axes, [AXES[name].label for name in axes], chosen)
    base = _of_partition(frame, "datum.metric === metric && datum.axis === axis")
    picked = alt.selection_point(fields=["method"], bind="legend")
    scale = alt.Scale(type="log", nice=False) if is_log else alt.Scale(zero=False)
    x = alt.X("x:Q", title=None, scale=alt.Scale(zero=False, nice=False), axis=_few_ticks())
    color = _color(data, frame["method"])

    band = base.mark_area().encode(
        x=x,
        y=alt.Y("low:Q", title=None, scale=scale),
        y2="high:Q",
        color=color,
        opacity=alt.condition(picked, alt.value(0.16), alt.value(0.02)),
    )
    line = base.mark_line(strokeWidth=2, clip=True).encode(
        x=x,
        y=alt.Y("mean:Q", title=None, scale=scale),
        color=color,
        opacity=alt.condition(picked, alt.value(1), alt.value(0.12)),
    )
    # Single points are seen; the others only carry the tooltip.
    is_single = frame.groupby(["method", "partition", "metric", "axis"]).size().max() == 1
    dots = base.mark_circle(size=70, opacity=1 if is_single else 0).encode(
        x=x,
        y=alt.Y("mean:Q", title=None, scale=scale),
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
    dots = base.mark_circle(size=75, opacity=0.6).encode(
        x=alt.X("x:Q", title=None, scale=alt.Scale(zero=True), axis=_few_ticks()),
        y=y,
        color=_color(data),
        tooltip=["method:N", "seed:N", alt.Tooltip("x:Q", format=",.4~g", title="reached at")],
    )
    mean = base.mark_tick(thickness=2.5, size=22).encode(x="mean(x):Q", y=y, color=_color(data))
    chart = alt.layer(dots, mean).add_params(axis, _partition(data))
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
    color = alt.Color(
        "verdict:N", title=None, scale=alt.Scale(domain=verdicts, range=[COLORS[0], "#8b939c"])
    )
    zero = alt.Chart(_inline(pd.DataFrame({"x": [0]}))).mark_rule(color="#8b939c")
    lines = base.mark_rule(strokeWidth=2.5).encode(
        x=alt.X("low:Q", title=None, axis=_few_ticks()), x2="high:Q", y=y, color=color
    )
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("difference:Q", title=None),
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
            title=None,
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
    x = alt.X("value:Q", title=None, scale=alt.Scale(zero=False), axis=_few_ticks())
    ticks = base.mark_tick(thickness=1.5, size=20, opacity=0.55).encode(
        x=x,
        y=y,
        color=_color(data),
        tooltip=["method:N", "client:N", "seed:N", alt.Tooltip("value:Q", format=".3f")],
    )
    mean = base.mark_point(filled=True, shape="diamond", size=130, opacity=1).encode(
        x=alt.X("mean(value):Q"), y=y, color=_color(data)
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
    diagonal = alt.Chart(_inline(ends)).mark_line(color="#8b939c", strokeWidth=1)
    scale = alt.Scale(domain=[low, high], nice=True)
    x = alt.X("alone:Q", title="alone", scale=scale, axis=_few_ticks())
    y = alt.Y("score:Q", title="in the federation", scale=scale)
    dots = _of_partition(data.gains).mark_circle(size=55, opacity=0.65)
    encoded = dots.encode(
        x=x,
        y=y,
        color=_color(data, data.gains["method"]),
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
            title=None,
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


def _color(data: PageData, legend_of: pd.Series | None = None) -> alt.Color:
    """Return the colour of each method, with a legend of those in a column, if there is one."""
    named = data.methods if legend_of is None else _in_order(data.methods, legend_of)
    colors = [COLORS[data.methods.index(name) % len(COLORS)] for name in named]
    legend = alt.Legend(symbolOpacity=1, symbolType="circle", symbolStrokeWidth=0)
    return alt.Color(
        "method:N",
        title=None,
        scale=alt.Scale(domain=named, range=colors),
        legend=None if legend_of is None else legend,
    )


def _in_order(names: Sequence[str], column: pd.Series) -> list[str]:
    """Return those of the names that a column has."""
    return [name for name in names if name in set(column)]


def _few_ticks() -> alt.Axis:
    """Return an axis whose number of labels follows the width of the chart."""
    return alt.Axis(tickCount=alt.ExprRef("ceil(width / 90)"))


def _row_axis() -> alt.Axis:
    return alt.Axis(labelLimit=170, labelPadding=8, ticks=False, domain=False)


def _rows_height(rows: Sequence[str]) -> int:
    return 40 + 34 * len(rows)


def _unique(column: pd.Series) -> list[str]:
    return [str(value) for value in dict.fromkeys(column)]
