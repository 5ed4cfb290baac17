"""The charts of the page, as Vega-Lite.

Each chart holds its own aggregated data, for all choices of its menus. The page has one menu for
the partition, which sets the parameter ``partition`` of every chart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from flsuite.analysis.curves import GAMMA
from flsuite.analysis.panels import AXES
from flsuite.analysis.publish.page.data import PageData
from flsuite.analysis.publish.page.parts import (
    COLORS,
    GREY,
    chosen_axis,
    computed,
    few_ticks,
    in_order,
    inline,
    menu_of,
    method_color,
    of_choice,
    of_partition,
    row_axis,
    rows_height,
    unique,
    with_titles,
)
from flsuite.common.score_names import shown_score

_INTERVAL = ["difference", "low", "high", "p", "p_holm"]
_Draw = Callable[[PageData, pd.DataFrame], alt.Chart | alt.LayerChart]


def charts(data: PageData) -> dict[str, dict[str, Any]]:
    """Return the specification of each chart for which there is data."""
    partition = alt.param(name="partition", value=data.partitions[0])
    specs = {}
    with alt.data_transformers.enable("default", max_rows=None):
        for name, draw in _CHARTS.items():
            frame = data.tables.get(name, pd.DataFrame())
            if len(frame):
                chart = draw(data, frame).add_params(partition).properties(width="container")
                spec = with_titles(chart.to_dict())
                spec.pop("$schema")  # a URL that the page does not need
                spec.pop("config", None)  # the page has its own light and dark configs
                specs[name] = spec
    return specs


def _curves(data: PageData, frame: pd.DataFrame) -> alt.LayerChart:
    """Draw mean and range over seeds, with menus for the metric and the axis."""
    return _lines(data, frame, "Score", is_log=False)


def _gamma(data: PageData, frame: pd.DataFrame) -> alt.LayerChart:
    """Draw gamma and its parts, as far as they were logged."""
    return _lines(data, frame, "Number", is_log=bool((frame["low"] > 0).all()))


def _lines(data: PageData, frame: pd.DataFrame, title: str, is_log: bool) -> alt.LayerChart:
    names = unique(frame["metric"])
    labels = [GAMMA.get(name, shown_score(name)) for name in names]
    menu = menu_of("metric", title, names, labels)
    axes = unique(frame["axis"])
    axis = _axis_menu(data, "over", axes)
    base = of_partition(frame, "datum.metric === metric && datum.axis === axis")
    picked = alt.selection_point(fields=["method"], bind="legend")
    scale = alt.Scale(type="log", nice=False) if is_log else alt.Scale(zero=False)
    x = alt.X("x:Q", scale=alt.Scale(zero=False, nice=False), axis=chosen_axis(axes))
    y_axis = alt.Axis(title=computed("metric", dict(zip(names, labels, strict=True))))
    y = alt.Y("mean:Q", scale=scale, axis=y_axis)
    color = method_color(data, frame, ("metric", "axis"))

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
        # Of equal lines, the one below shows through.
        strokeDash=alt.StrokeDash("method:N", sort=data.methods, legend=None),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.12)),
    )
    # Single points are visible. The others only carry the tooltip.
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
    return chart.add_params(menu, axis).properties(height=340)


def _axis_menu(data: PageData, title: str, axes: Sequence[str]) -> alt.Parameter:
    chosen = data.axis if data.axis in axes else axes[0]
    return menu_of("axis", title, axes, [AXES[name].label for name in axes], chosen)


def _targets(data: PageData, frame: pd.DataFrame) -> alt.LayerChart:
    """Draw where each run reaches the target, and the mean of those that do."""
    axes = unique(frame["axis"])
    axis = _axis_menu(data, "Axis", axes)
    base = of_partition(frame, "datum.axis === axis")
    y = alt.Y("method:N", title=None, sort=data.methods, axis=row_axis())
    x = alt.X("x:Q", scale=alt.Scale(zero=True), axis=chosen_axis(axes))
    dots = base.mark_circle(size=75, opacity=0.6).encode(
        x=x,
        y=y,
        color=method_color(data),
        tooltip=["method:N", "seed:N", alt.Tooltip("x:Q", format=",.4~g", title="reached at")],
    )
    mean = base.mark_tick(thickness=2.5, size=22).encode(
        x=alt.X("mean(x):Q", axis=chosen_axis(axes)), y=y, color=method_color(data)
    )
    # A note in the row counts the runs that reach the target.
    counts = base.transform_aggregate(
        runs="count()", reached="valid(x)", groupby=["method"]
    ).transform_filter("datum.reached < datum.runs")
    notes = counts.transform_calculate(
        text="datum.reached + ' of ' + datum.runs + ' reach it'"
    ).mark_text(align="left", dx=8, color=GREY)
    notes = notes.encode(x=alt.value(alt.ExprRef("width")), y=y, text="text:N")
    chart = alt.layer(dots, mean, notes).add_params(axis)
    return chart.properties(height=rows_height(data.methods))


def _differences(data: PageData, frame: pd.DataFrame) -> alt.LayerChart:
    """Draw the mean difference of each pair with its interval."""
    verdicts = ["differs", "no clear difference"]
    frame = frame.assign(
        pair=frame["method"] + " - " + frame["other"],
        verdict=[verdicts[0 if differs else 1] for differs in frame["differs"]],
    )
    base = of_partition(frame[["partition", "pair", "verdict", *_INTERVAL]])
    y = alt.Y("pair:N", title=None, sort=unique(frame["pair"]), axis=row_axis())
    seen = {
        str(name): unique(own["verdict"]) for name, own in frame.groupby("partition", sort=False)
    }
    color = alt.Color(
        "verdict:N",
        title=None,
        scale=alt.Scale(domain=verdicts, range=[COLORS[0], GREY]),
        legend=alt.Legend(values=alt.ExprRef(f"{of_choice('partition', seen)} || []")),
    )
    zero = alt.Chart(inline(pd.DataFrame({"x": [0]}))).mark_rule(color=GREY)
    title = f"difference in {data.score}"
    lines = base.mark_rule(strokeWidth=2.5).encode(
        x=alt.X("low:Q", title=title, axis=few_ticks()), x2="high:Q", y=y, color=color
    )
    dots = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("difference:Q", title=title),
        y=y,
        color=color,
        tooltip=["pair:N", *(alt.Tooltip(f"{name}:Q", format=".4~f") for name in _INTERVAL)],
    )
    chart = alt.layer(zero.encode(x="x:Q"), lines, dots)
    return chart.properties(height=rows_height(unique(frame["pair"])))


def _client_map(data: PageData, frame: pd.DataFrame) -> alt.Chart:
    """Draw the clients' scores over the rounds of one run."""
    methods = in_order(data.methods, frame["method"])
    chart = of_partition(frame, "datum.method === method").mark_rect()
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
    clients = frame["client"].nunique()
    menu = menu_of("method", "Method", methods)
    return encoded.add_params(menu).properties(height=min(max(300, 14 * clients), 480))


def _client_spread(data: PageData, frame: pd.DataFrame) -> alt.LayerChart:
    """Draw the last score of each client, and the mean of each method."""
    base = of_partition(frame)
    y = alt.Y("method:N", title=None, sort=data.methods, axis=row_axis())
    x = alt.X("value:Q", title=data.score, scale=alt.Scale(zero=False), axis=few_ticks())
    ticks = base.mark_tick(thickness=1.5, size=20, opacity=0.55).encode(
        x=x,
        y=y,
        color=method_color(data),
        tooltip=["method:N", "client:N", "seed:N", alt.Tooltip("value:Q", format=".3f")],
    )
    mean = base.mark_point(filled=True, shape="diamond", size=130, opacity=1).encode(
        x=alt.X("mean(value):Q", title=data.score), y=y, color=method_color(data)
    )
    return alt.layer(ticks, mean).properties(height=rows_height(data.methods))


def _gains(data: PageData, frame: pd.DataFrame) -> alt.LayerChart:
    """Draw each client's score against its score when training alone."""
    values = frame[["alone", "score"]]
    low, high = float(values.min().min()), float(values.max().max())
    ends = pd.DataFrame({"alone": [low, high], "score": [low, high]})
    diagonal = alt.Chart(inline(ends)).mark_line(color=GREY, strokeWidth=1)
    scale = alt.Scale(domain=[low, high], nice=True)
    x = alt.X("alone:Q", title=f"{data.score} alone", scale=scale, axis=few_ticks())
    y = alt.Y("score:Q", title=f"{data.score} in the federation", scale=scale)
    dots = of_partition(frame).mark_circle(size=55, opacity=0.65)
    encoded = dots.encode(
        x=x,
        y=y,
        color=method_color(data, frame),
        tooltip=["method:N", "client:N", "seed:N", "alone:Q", "score:Q"],
    )
    return alt.layer(diagonal.encode(x=x, y=y), encoded).properties(height=360)


def _class_mix(data: PageData, frame: pd.DataFrame) -> alt.Chart:
    """Draw the classes of each client as stacked bars."""
    classes = unique(frame["class"])
    chart = of_partition(frame).mark_bar()
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
    return encoded.properties(height=260)


_CHARTS: dict[str, _Draw] = {
    "curves": _curves,
    "targets": _targets,
    "differences": _differences,
    "map": _client_map,
    "spread": _client_spread,
    "gains": _gains,
    "mix": _class_mix,
    "gamma": _gamma,
}
