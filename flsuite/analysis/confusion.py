"""Confusion matrices, from the predictions of runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.panels import by_experiment, draw_matrix, panel_grid
from flsuite.analysis.results import require_results
from flsuite.analysis.runs import read_partition, read_table
from flsuite.common.errors import FlsuiteError


def confusion_figure(results: pd.DataFrame) -> Figure:
    """Draw the share of each class that is predicted as each class, one panel per method.

    Counts are summed over seeds.

    Args:
        results: A table from :func:`~flsuite.analysis.load`. The runs need predictions, which
            ``flsuite predict`` writes.

    Raises:
        FlsuiteError: If a run has no predictions, or a sample has several labels.
    """
    require_results(results)
    totals = {}
    for title, rows in by_experiment(results).items():
        counts = [confusion_matrix(run) for run in rows["run"].unique()]
        totals[title] = sum(counts[1:], counts[0])
    return draw_confusion(totals)


def draw_confusion(counts: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the share of each class predicted as each class, one panel per matrix of counts."""
    matrices = {
        title: pairs.div(pairs.sum(axis=1).replace(0, np.nan), axis=0)
        for title, pairs in counts.items()
    }
    classes = len(next(iter(matrices.values())))
    side = 1.6 + min(0.42 * classes, 5.0)
    figure, panels = panel_grid(len(matrices), (side + 0.4, side))
    for panel, (title, matrix) in zip(panels, matrices.items(), strict=True):
        image = draw_matrix(panel, matrix)
        panel.tick_params(axis="x", rotation=90 if max(map(len, matrix.columns)) > 2 else 0)
        panel.set(xlabel="prediction", ylabel="class")
        panel.set_title(title, fontsize=10)
    figure.colorbar(image, ax=panels, label="share of the class", fraction=0.04)
    return figure


def confusion_matrix(run_dir: str | Path) -> pd.DataFrame:
    """Return the number of test samples by true class and predicted class.

    Rows are the classes, and columns are the predictions, by name.

    Raises:
        FlsuiteError: If the run has no predictions, or a sample has several labels.
    """
    folder = Path(run_dir)
    if not (folder / "predictions.csv").is_file():
        raise FlsuiteError(
            f"{folder} has no predictions.csv: write it with flsuite predict --config "
            f"{folder / 'config.yaml'}"
        )
    table = read_table(folder / "predictions.csv", {"target": "str", "prediction": "str"})
    try:
        target, prediction = (table[name].astype(int) for name in ("target", "prediction"))
    except ValueError as error:
        raise FlsuiteError(
            f"{folder / 'predictions.csv'} has samples with several labels or none, which have no "
            "confusion matrix"
        ) from error

    names = list(read_partition(folder)["class"].unique())
    return count_pairs(target.to_numpy(), prediction.to_numpy(), names)


def count_pairs(targets: np.ndarray, predictions: np.ndarray, names: list[str]) -> pd.DataFrame:
    """Count the samples by true class (row) and predicted class (column)."""
    counts = np.zeros((len(names), len(names)), dtype=int)
    np.add.at(counts, (targets, predictions), 1)
    return pd.DataFrame(counts, index=names, columns=names)
