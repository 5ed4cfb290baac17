"""A run's tables, and its curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsuite.errors import FlsuiteError

__all__ = ["curve", "curves_figure", "read_metrics", "read_partition"]


def read_metrics(run_dir: str | Path) -> pd.DataFrame:
    """``metrics.csv`` of a run: columns ``round, virtual_s, wall_s, scope, split, metric, value``, scope as text."""
    return _read(Path(run_dir) / "metrics.csv").astype({"scope": str})


def read_partition(run_dir: str | Path) -> pd.DataFrame:
    """``partition.csv`` of a run: columns ``client, split, class, samples``."""
    return _read(Path(run_dir) / "partition.csv").astype({"class": str})


def curve(table: pd.DataFrame, metric: str, split: str, scope: str = "global") -> pd.Series:
    """A score over rounds."""
    chosen = table[
        (table["scope"] == scope) & (table["split"] == split) & (table["metric"] == metric)
    ]
    return chosen.set_index("round")["value"]


def curves_figure(
    runs: Mapping[str, str | Path],
    metrics: Sequence[str] = ("accuracy", "loss"),
    split: str = "test",
    x: str = "round",
) -> Figure:
    """The global scores of one or more runs over rounds, virtual or wall seconds.

    Args:
        runs: Label to run folder.
        metrics: One panel each.
        split: ``val`` or ``test``.
        x: ``round``, ``virtual_s`` or ``wall_s``.
    """
    figure = Figure(figsize=(4.6 * len(metrics), 3.4), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for label, folder in runs.items():
        table = read_metrics(folder)
        part = table[(table["scope"] == "global") & (table["split"] == split)]
        for panel, metric in zip(panels, metrics, strict=True):
            curve = part[part["metric"] == metric]
            panel.plot(curve[x], curve["value"], label=label, linewidth=1.8)
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
    return pd.read_csv(path)
