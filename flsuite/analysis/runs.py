"""A run's tables, and its curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsuite.analysis.axes import AXES, require_axis
from flsuite.errors import FlsuiteError, one_line

__all__ = [
    "curve",
    "curves_figure",
    "is_metrics",
    "label_axes",
    "read_metrics",
    "read_partition",
    "read_table",
]

_LATER_COLUMNS = ("client_updates", "bytes")  # those that runs of earlier versions do not have
_COLUMNS = ("round", "virtual_s", "wall_s", *_LATER_COLUMNS, "scope", "split", "metric", "value")
_EARLIER_COLUMNS = tuple(name for name in _COLUMNS if name not in _LATER_COLUMNS)


def is_metrics(path: Path) -> bool:
    """Return whether a file has the columns of a run's ``metrics.csv``."""
    with path.open() as file:
        return tuple(file.readline().strip().split(",")) in (_COLUMNS, _EARLIER_COLUMNS)


def read_metrics(run_dir: str | Path) -> pd.DataFrame:
    """Read ``metrics.csv`` of a run.

    Its columns are ``round, virtual_s, wall_s, client_updates, bytes, scope, split, metric,
    value``; scope is text. A run of an earlier version has no ``client_updates`` and ``bytes``, and
    they are empty.

    Raises:
        FlsuiteError: If the table is not there, or is not that of a run.
    """
    path = Path(run_dir) / "metrics.csv"
    table = read_table(path)
    if missing := [name for name in _EARLIER_COLUMNS if name not in table]:
        raise FlsuiteError(
            f"{path} is not the table of a run: it lacks the columns {', '.join(missing)}"
        )
    return table.astype({"scope": str}).reindex(columns=list(_COLUMNS))


def read_partition(run_dir: str | Path) -> pd.DataFrame:
    """Read ``partition.csv`` of a run: columns ``client, split, class, samples``."""
    return read_table(Path(run_dir) / "partition.csv").astype({"class": str})


def read_table(path: Path) -> pd.DataFrame:
    """Read a table of a run.

    Raises:
        FlsuiteError: If it is not there, or is no table.
    """
    if not path.is_file():
        raise FlsuiteError(f"{path.parent} is not the folder of a run: it has no {path.name}")
    try:
        return pd.read_csv(path)
    except (ValueError, pd.errors.ParserError) as error:  # also bytes that are no text
        raise FlsuiteError(f"{path} cannot be read as a table ({one_line(error)})") from error


def curve(
    table: pd.DataFrame, metric: str, split: str, scope: str = "global", x: str = "round"
) -> pd.Series:
    """Return a score, indexed by the column ``x``."""
    rows = table[
        (table["scope"] == scope) & (table["split"] == split) & (table["metric"] == metric)
    ]
    return rows.set_index(x)["value"]


def curves_figure(
    runs: Mapping[str, str | Path],
    metrics: Sequence[str] = ("accuracy", "loss"),
    split: str = "test",
    x: str = "round",
) -> Figure:
    """Draw the global scores of one or more runs.

    Args:
        runs: Label to run folder.
        metrics: Names of scores, one panel each.
        split: ``val`` or ``test``.
        x: The horizontal axis: ``round``, ``virtual_s``, ``wall_s``, ``client_updates`` or
            ``bytes``.

    Raises:
        FlsuiteError: If the axis does not exist, or a run has not noted it.
    """
    figure = Figure(figsize=(4.6 * len(metrics), 3.4), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]

    for label, folder in runs.items():
        table = read_metrics(folder)
        require_axis(x, table, folder)
        for panel, metric in zip(panels, metrics, strict=True):
            scores = curve(table, metric, split, x=x)
            panel.plot(scores.index * AXES[x].scale, scores, label=label, linewidth=1.8)

    for panel, metric in zip(panels, metrics, strict=True):
        label_axes(panel, metric, split, x)
    if len(runs) > 1:
        panels[0].legend(frameon=False)
    return figure


def label_axes(panel: Axes, metric: str, split: str, x: str) -> None:
    """Name the axes of a panel of curves, and give it a grid."""
    panel.set(xlabel=AXES[x].label, ylabel=f"{split} {metric.replace('_', ' ')}")
    panel.xaxis.set_major_locator(MaxNLocator(integer=AXES[x].is_whole))
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
