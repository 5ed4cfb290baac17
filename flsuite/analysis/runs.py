"""A run's tables, and its curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsuite.errors import FlsuiteError, one_line

__all__ = ["curve", "curves_figure", "is_metrics", "read_metrics", "read_partition"]

_COLUMNS = ("round", "virtual_s", "wall_s", "scope", "split", "metric", "value")


def is_metrics(path: Path) -> bool:
    """Return whether a file has the columns of a run's ``metrics.csv``."""
    with path.open() as file:
        return file.readline().strip() == ",".join(_COLUMNS)


def read_metrics(run_dir: str | Path) -> pd.DataFrame:
    """Read ``metrics.csv`` of a run.

    Its columns are ``round, virtual_s, wall_s, scope, split, metric, value``; scope is text.
    """
    return _read(Path(run_dir) / "metrics.csv").astype({"scope": str})


def read_partition(run_dir: str | Path) -> pd.DataFrame:
    """Read ``partition.csv`` of a run: columns ``client, split, class, samples``."""
    return _read(Path(run_dir) / "partition.csv").astype({"class": str})


def curve(table: pd.DataFrame, metric: str, split: str, scope: str = "global") -> pd.Series:
    """Return a score over rounds, indexed by round."""
    rows = table[
        (table["scope"] == scope) & (table["split"] == split) & (table["metric"] == metric)
    ]
    return rows.set_index("round")["value"]


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
        x: The horizontal axis: ``round``, ``virtual_s`` or ``wall_s``.
    """
    figure = Figure(figsize=(4.6 * len(metrics), 3.4), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]

    for label, folder in runs.items():
        table = read_metrics(folder)
        scores = table[(table["scope"] == "global") & (table["split"] == split)]
        for panel, metric in zip(panels, metrics, strict=True):
            rows = scores[scores["metric"] == metric]
            panel.plot(rows[x], rows["value"], label=label, linewidth=1.8)

    for panel, metric in zip(panels, metrics, strict=True):
        panel.set(
            xlabel={"virtual_s": "virtual seconds", "wall_s": "seconds"}.get(x, x),
            ylabel=f"{split} {metric.replace('_', ' ')}",
        )
        panel.xaxis.set_major_locator(MaxNLocator(integer=x == "round"))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        panels[0].legend(frameon=False)
    return figure


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise FlsuiteError(f"{path.parent} is not the folder of a run: it has no {path.name}")
    try:
        return pd.read_csv(path)
    except (ValueError, pd.errors.ParserError) as error:  # also bytes that are no text
        raise FlsuiteError(f"{path} cannot be read as a table ({one_line(error)})") from error
