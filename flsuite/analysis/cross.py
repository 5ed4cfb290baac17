"""Cross tables: scores of runs by two of their settings, such as the aggregator and the attack."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.groups import Flat, Group, Variation, setting_text, shown_value
from flsuite.analysis.panels import color_range, draw_matrix, grid_shape, new_figure
from flsuite.analysis.report import group_row, markdown_table, require_score, score_cell
from flsuite.common.errors import FlsuiteError

_SCORES = {"last": "last round", "picked": "picked on validation"}
_PLACE = ["panel", "row", "column"]
_OF_A_FORK = ("fork", "fork.parent")  # they follow from the other settings and the round
_OPEN = object()  # placeholder for a setting of an object that a group lacks


def cross_table(
    groups: Sequence[Group], rows: str, columns: str, metrics: Sequence[str] = ("accuracy",)
) -> pd.DataFrame:
    """Return the scores by two settings, one row per panel, cell and metric.

    A panel is one combination of all other settings in which the groups differ. A group that lacks
    the object of such a setting appears in every panel. For example, a run without an attack has no
    fraction of attackers and is the baseline for all fractions.

    The columns are ``panel, row, column, metric, runs``, then mean and spread of the test scores in
    the last round (``last``) and in the round picked on validation data (``picked``).

    Args:
        groups: The experiments.
        rows: The path of a setting, such as ``aggregator`` or ``data.clients``.
        columns: The path of another setting.
        metrics: Names of test scores.

    Raises:
        FlsuiteError: If a setting or metric does not exist in any run, or two groups have the same
            cell.
    """
    rows, columns = (path.removeprefix("trainer.") for path in (rows, columns))
    _require_settings(groups, rows, columns)
    for metric in metrics:
        require_score(groups, metric, "test")

    scores = {
        id(group): [row for metric in metrics if (row := group_row(group, metric, last=1))]
        for group in groups
    }
    cells = []
    for panel, members in _panels(groups, rows, columns):
        for group in members:
            cell = (panel, _name(group, rows), _name(group, columns))
            place = dict(zip(_PLACE, cell, strict=True))
            cells += [place | row for row in scores[id(group)]]
    table = pd.DataFrame(cells)
    _require_one_group_per_cell(table)
    names = [*_PLACE, "metric", "runs", "last", "last_std", "picked", "picked_std"]
    table = table[[name for name in names if name in table]]
    table.attrs["columns"] = columns  # label of the figure's axis
    return table


def cross_matrices(
    table: pd.DataFrame, metric: str, score: str = "last"
) -> dict[str, pd.DataFrame]:
    """Return the means of each panel as a matrix. Cells without runs are NaN.

    Args:
        table: A table from :func:`cross_table`.
        metric: One of its metrics.
        score: ``last`` or ``picked``.
    """
    own = table[table["metric"] == metric]
    # "none" first, and numbers in numeric order
    index, columns = (
        sorted(own[name].unique(), key=lambda value: (value != "none", *_rank(value)))
        for name in ("row", "column")
    )
    return {
        str(panel): cells.pivot(index="row", columns="column", values=score).reindex(
            index=index, columns=columns
        )
        for panel, cells in own.groupby("panel", sort=False)
    }


def cross_markdown(table: pd.DataFrame) -> str:
    """Write a Markdown table per metric, score and panel, with cells ``mean ± spread``."""
    parts = []
    for metric, score in product(table["metric"].unique(), _SCORES):
        if score not in table:
            continue
        own = table[table["metric"] == metric]
        texts = [score_cell(row, score) for row in own.to_dict("records")]
        cells = own.assign(text=texts).set_index(_PLACE)["text"]
        for panel, matrix in cross_matrices(table, metric, score).items():
            rows = [
                [row, *(cells.get((panel, row, column), "") for column in matrix.columns)]
                for row in matrix.index
            ]
            shown = markdown_table(["", *matrix.columns], rows)
            parts.append(f"### {_title(metric, score, panel)}\n\n{shown}")
    return "\n".join(parts)


def cross_figure(table: pd.DataFrame, metric: str, score: str = "last") -> Figure:
    """Draw the means as heat maps, one per panel.

    Args:
        table: A table from :func:`cross_table`.
        metric: One of its metrics.
        score: ``last`` or ``picked``.
    """
    matrices = cross_matrices(table, metric, score)
    rows, columns = next(iter(matrices.values())).shape
    tall, wide = grid_shape(len(matrices))
    title_width = 0.075 * max(map(len, matrices)) + 0.2
    panel_width = max(0.5 + 0.42 * columns, title_width)
    size = (wide * panel_width + 2.2, tall * (0.4 + 0.27 * rows) + 1.3)
    figure = new_figure(*size)
    panels = figure.subplots(tall, wide, squeeze=False, sharex=True, sharey=True).ravel().tolist()

    values = pd.concat([matrix.stack().dropna() for matrix in matrices.values()])
    low, high = color_range(values)
    for n, (panel, (title, matrix)) in enumerate(zip(panels, matrices.items(), strict=False)):
        image = draw_matrix(panel, matrix, low=low, high=high, most=30)
        is_lowest = n + wide >= len(matrices)
        panel.tick_params(axis="x", rotation=90, labelbottom=is_lowest)
        panel.set_title(title, fontsize=9)
    for unused in panels[len(matrices) :]:
        unused.set_axis_off()
    figure.supxlabel(table.attrs.get("columns", ""), fontsize=10)
    bar = figure.colorbar(image, ax=panels, fraction=0.03)
    bar.set_label(_title(metric, score), fontsize=7)  # a single panel is low
    return figure


def _title(metric: object, score: str, panel: str = "") -> str:
    return ", ".join(filter(None, [f"test {metric}", _SCORES[score], panel]))


def _panels(groups: Sequence[Group], rows: str, columns: str) -> Iterator[tuple[str, list[Group]]]:
    """Yield the title and the groups of each panel."""
    keys = [key for key in _varying(groups) if key not in (rows, columns, *_OF_A_FORK)]
    # A run that is not a fork has no such round, and is the baseline of all forks.
    open_keys = {key for key in keys for axis in (rows, columns) if _is_related(key, axis)}
    open_keys.add("fork.round")
    places = [
        tuple(group.settings.get(key, _OPEN if key in open_keys else None) for key in keys)
        for group in groups
    ]
    distinct = list(dict.fromkeys(places))
    # Open values make no panel of their own if another panel has them all.
    panels = [
        own for own in distinct if not any(other != own and _fits(own, other) for other in distinct)
    ]
    for panel in sorted(panels, key=lambda own: [_rank(value) for value in own]):
        members = [g for g, own in zip(groups, places, strict=True) if _fits(own, panel)]
        yield _panel_title(dict(zip(keys, panel, strict=True))), members


def _varying(groups: Sequence[Group]) -> list[str]:
    """Return the settings in which the groups differ."""
    variation = Variation([group.settings for group in groups])
    return [
        key
        for key in variation.keys
        if any(variation.differs(key, group.settings) for group in groups)
    ]


def _is_related(key: str, axis: str) -> bool:
    """Return whether one of a setting and an axis is part of the other."""
    return f"{key}.".startswith(f"{axis}.") or f"{axis}.".startswith(f"{key}.")


def _fits(own: tuple[Any, ...], panel: tuple[Any, ...]) -> bool:
    """Return whether a group with these values, or ``_OPEN``, belongs to a panel."""
    return all(value is _OPEN or value == wanted for value, wanted in zip(own, panel, strict=True))


def _panel_title(settings: Flat) -> str:
    """Return the settings of a panel as text, without parts of missing objects."""
    return ", ".join(
        setting_text(key, value, settings)
        for key, value in settings.items()
        if value is not _OPEN and not (value is None and key.rpartition(".")[0] in settings)
    )


def _name(group: Group, key: str) -> str:
    """Return the value of a setting as the name of a row or column."""
    value = group.settings.get(key)
    return "none" if value is None else shown_value(value)


def _rank(value: Any) -> tuple[int, float, str]:
    """Return a sort key: missing values first, then numbers, then words."""
    if value is None or value is _OPEN:
        return 0, 0.0, ""
    try:
        return 1, float(value), ""
    except (TypeError, ValueError):
        return 2, 0.0, str(value)


def _require_settings(groups: Sequence[Group], rows: str, columns: str) -> None:
    if rows == columns:
        raise FlsuiteError(f"rows and columns are both {rows!r}; name two settings")
    for key in (rows, columns):
        if not any(key in group.settings for group in groups):
            differ = ", ".join(_varying(groups)) or "none"
            raise FlsuiteError(f"no run has the setting {key!r}; the runs differ in {differ}")


def _require_one_group_per_cell(table: pd.DataFrame) -> None:
    doubled = table[table.duplicated([*_PLACE, "metric"])]
    if len(doubled):
        panel, row, column = (doubled.iloc[0][name] for name in _PLACE)
        raise FlsuiteError(
            f"two experiments have the cell {row}, {column} of the panel {panel or 'of all runs'}: "
            "some of the runs come from another version; name their folders one at a time"
        )
