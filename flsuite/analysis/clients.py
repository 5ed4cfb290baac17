"""Figures of single clients: scores, gain from federation, contribution, confusion."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsuite.analysis.panels import (
    by_experiment,
    color_range,
    draw_client_rounds,
    legend_right,
    matrices_figure,
    new_figure,
    panel_grid,
    tidy,
)
from flsuite.analysis.results import client_numbers, only, require_results
from flsuite.analysis.runs import read_partition, read_table
from flsuite.common.errors import FlsuiteError
from flsuite.common.score_names import lower_is_better


def clients_figure(
    results: pd.DataFrame, metric: str = "accuracy", split: str = "test", clients: int = 100
) -> Figure:
    """Draw the clients' scores over the rounds as heat maps, one panel per method and partition.

    Each panel shows one run, the one with the first seed, because clients differ between seeds.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metric: The score.
        split: ``test`` or ``val``.
        clients: Maximum number of clients to show, starting with client 0.

    Raises:
        FlsuiteError: If the clients have no such score.
    """
    rows = only(results, metric, split, scope=None)
    maps = {title: _by_round(part, clients) for title, part in by_experiment(rows).items()}

    figure, panels = panel_grid(len(maps), (4.4, 3.2))
    low, high = color_range(rows["value"])
    for panel, (title, table) in zip(panels, maps.items(), strict=True):
        image = draw_client_rounds(panel, table, low, high)
        panel.set_title(title, fontsize=10)
    figure.colorbar(image, ax=panels, label=f"{split} {metric}", fraction=0.04)
    return figure


def gain_figure(
    results: pd.DataFrame, metric: str = "accuracy", split: str = "test", over: str = "LocalOnly"
) -> Figure:
    """Draw each client's score against its score when training alone, one panel per method.

    A dot is a client of one seed. Above the diagonal, the federation helps the client.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metric: The score, in the last round.
        split: ``test`` or ``val``.
        over: The method to compare with, as named in the table.

    Raises:
        FlsuiteError: If the method does not exist, or no client has both scores.
    """
    gains = client_gains(results, metric, split, over)
    methods = list(gains["method"].unique())
    figure, panels = panel_grid(len(methods), (3.5, 3.5))
    values = gains[["alone", "score"]].to_numpy()
    margin = 0.04 * max(float(np.ptp(values)), 1e-9)
    ends = values.min() - margin, values.max() + margin

    for panel, method in zip(panels, methods, strict=True):
        own = gains[gains["method"] == method]
        panel.plot(ends, ends, color="0.5", linewidth=0.9, zorder=0)
        for partition, dots in own.groupby("partition", observed=True):
            panel.scatter(
                dots["alone"], dots["score"], s=18, alpha=0.7, linewidths=0, label=partition
            )
        better = (own["gain"] > 0).mean()
        panel.set_title(
            f"{method}: {own['gain'].mean():+.3f} on average, {better:.0%} gain", fontsize=9
        )
        panel.set(xlim=ends, ylim=ends, xlabel=f"{over}: {split} {metric}", ylabel=method)
        panel.set_aspect("equal")
        tidy(panel)
    if gains["partition"].nunique() > 1:
        legend_right(figure, panels[0])
    return figure


def client_gains(
    results: pd.DataFrame, metric: str = "accuracy", split: str = "test", over: str = "LocalOnly"
) -> pd.DataFrame:
    """Return each client's gain from each method, compared with a baseline method.

    Clients are compared within the same partition and seed.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metric: The score, in the last round in which the client has one.
        split: ``test`` or ``val``.
        over: The baseline method.

    Returns:
        Columns ``method, partition, seed, client, alone, score, gain``: the client's score with the
        baseline (``alone``), with the method (``score``), and the difference. ``gain`` is positive
        if the method is better, also for a loss.

    Raises:
        FlsuiteError: If the baseline does not exist, or no client has both scores.
    """
    scores = final_scores(results, metric, split)
    if over not in set(scores["method"]):
        raise FlsuiteError(
            f"gain: no run of {over!r} has clients with the {split} score {metric!r}; the methods "
            f"are {', '.join(sorted(set(scores['method'])))}: name one of them with over"
        )

    keys = ["partition", "seed", "client"]
    alone = scores[scores["method"] == over].rename(columns={"value": "alone"})
    others = scores[scores["method"] != over].rename(columns={"value": "score"})
    pairs = others.merge(alone[[*keys, "alone"]], on=keys)
    if pairs.empty:
        raise FlsuiteError(
            f"gain: no client has a score under {over} and under another method, in the same "
            "partition and with the same seed; run both with the same seeds"
        )
    sign = -1 if lower_is_better(metric) else 1
    pairs["gain"] = sign * (pairs["score"] - pairs["alone"])
    return pairs[["method", *keys, "alone", "score", "gain"]]


def final_scores(
    results: pd.DataFrame, metric: str = "accuracy", split: str = "test"
) -> pd.DataFrame:
    """Return the last score of each client of each run.

    Its columns are ``method, partition, seed, client, value``.
    """
    rows = only(results, metric, split, scope=None)
    last = rows.sort_values("round").drop_duplicates(["run", "scope"], keep="last")
    columns = ["method", "partition", "seed", "client", "value"]
    table = pd.DataFrame(last.assign(client=client_numbers(last)))[columns]
    table = table.astype({"method": str, "partition": str})
    return table.sort_values(columns[:-1], ignore_index=True)


def _by_round(rows: pd.DataFrame, clients: int) -> pd.DataFrame:
    """Return the scores of the first run, with clients as rows and rounds as columns."""
    first = rows[rows["run"] == rows["run"].iloc[0]]
    numbered = pd.DataFrame(first[["round", "value"]]).assign(client=client_numbers(first))
    return numbered.pivot(index="client", columns="round", values="value").head(clients)


_FEWEST = 3  # clients for a rank correlation: of two, it is always 1 or -1


def contribution_table(values: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return a row per client, with the mean and spread of its contribution by each method.

    Args:
        values: A row per contribution: ``run``, ``client``, ``samples``, ``name``, ``value``. A
            client has one per run, or one per order of joining.
        names: The methods.
    """
    table = values.groupby("client")[["samples"]].mean()
    for name in names:
        own = values[values["name"] == name].groupby("client")["value"]
        statistics = own.agg(["mean", "std", "size"])
        table[[name, f"{name}_std", f"{name}_values"]] = statistics
    return table.reset_index()


def _by_run(values: pd.DataFrame) -> pd.DataFrame:
    """Return the mean contribution of each client of each run, with a column per method."""
    return values.pivot_table(index=["run", "client"], columns="name", values="value")


def rank_correlation(values: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    """Return Spearman's rank correlation of two methods over the clients of each run.

    It is NaN if a method ranks all clients equally, or there are fewer than three clients.

    Args:
        values: A table as for :func:`contribution_table`.
        names: The two methods.
    """
    first, second = names
    correlations = {
        run: rows.corr("spearman", min_periods=_FEWEST).loc[first, second]
        for run, rows in _by_run(values).groupby("run")
    }
    return pd.Series(correlations, dtype=float)


def contribution_figure(
    table: pd.DataFrame, values: pd.DataFrame, title: str, names: Sequence[str]
) -> Figure:
    """Draw the contributions as bars with their spread, and two methods against each other.

    Args:
        table: A table from :func:`contribution_table`.
        values: The table that it was made from.
        title: The title of the figure.
        names: One method or two.
    """
    width = max(3.4, 0.28 * len(table) + 1.2)
    widths = [width] * len(names) + [3.2] * (len(names) - 1)
    figure = new_figure(sum(widths), 3.2)
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=False):
        _bars(axes, table, name)
    if len(names) == 2:
        _against(panels[-1], values, names)
    figure.suptitle(title, fontsize=10)
    return figure


def _bars(axes: Axes, table: pd.DataFrame, name: str) -> None:
    spread = table[f"{name}_std"] if table[f"{name}_std"].notna().all() else None
    axes.bar(table["client"].astype(str), table[name], yerr=spread, color="tab:blue")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="client", ylabel=name)


def _against(axes: Axes, values: pd.DataFrame, names: Sequence[str]) -> None:
    for run, rows in _by_run(values).groupby("run"):
        axes.scatter(rows[names[0]], rows[names[1]], s=14, label=str(run))
    axes.axhline(0, color="black", linewidth=0.5)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set(xlabel=names[0], ylabel=names[1])
    correlations = rank_correlation(values, names)
    if correlations.notna().any():
        axes.set_title(f"rank correlation {correlations.mean():.2f}", fontsize=9)
    if values["run"].nunique() > 1:
        axes.legend(fontsize=7)


def confusion_figure(results: pd.DataFrame, clients: Sequence[int] | None = None) -> Figure:
    """Draw the share of each class that is predicted as each class, one panel per method.

    Counts are summed over seeds.

    Args:
        results: A table from :func:`~flsuite.analysis.load`. The runs need predictions, which
            ``flsuite predict`` writes.
        clients: Draw a panel per method and client: the client's part of the test data, by its own
            model if it has one. Default: all test data.

    Raises:
        FlsuiteError: If a run or client has no predictions, or a sample has several labels.
    """
    require_results(results)
    totals = {}
    for title, rows in by_experiment(results).items():
        for client in [None] if clients is None else clients:
            counts = [confusion_matrix(run, client) for run in rows["run"].unique()]
            name = title if client is None else f"{title}, client {client}"
            totals[name] = sum(counts[1:], counts[0])
    return draw_confusion(totals)


def draw_confusion(counts: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the share of each class predicted as each class, one panel per matrix of counts."""
    matrices = {
        title: pairs.div(pairs.sum(axis=1).replace(0, np.nan), axis=0)
        for title, pairs in counts.items()
    }
    classes = len(next(iter(matrices.values())))
    side = 1.6 + min(0.42 * classes, 5.0)
    bar: dict[str, Any] = {"label": "share of the class", "fraction": 0.04}
    figure = matrices_figure(matrices, (side + 0.4, side), "prediction", "class", **bar)
    for panel, matrix in zip(figure.axes, matrices.values(), strict=False):
        panel.tick_params(axis="x", rotation=90 if max(map(len, matrix.columns)) > 2 else 0)
    return figure


def confusion_matrix(run_dir: str | Path, client: int | None = None) -> pd.DataFrame:
    """Return the number of test samples by true class and predicted class.

    Rows are the classes, and columns are the predictions, by name.

    Args:
        run_dir: The run's folder.
        client: Count the client's part of the test data, by its own model if it has one. Default:
            all test data, by the global model or the mean over the clients' models.

    Raises:
        FlsuiteError: If the run or client has no predictions, or a sample has several labels.
    """
    folder = Path(run_dir)
    if not (folder / "predictions.csv").is_file():
        raise FlsuiteError(
            f"{folder} has no predictions.csv: write it with flsuite predict --config "
            f"{folder / 'config.yaml'}"
        )
    words = dict.fromkeys(("model", "target", "prediction"), "str")
    table = _of_client(read_table(folder / "predictions.csv", words), client, folder)
    try:
        target, prediction = (table[name].astype(int) for name in ("target", "prediction"))
    except ValueError as error:
        raise FlsuiteError(
            f"{folder / 'predictions.csv'} has samples with several labels or none, which have no "
            "confusion matrix"
        ) from error

    names = list(read_partition(folder)["class"].unique())
    return count_pairs(target.to_numpy(), prediction.to_numpy(), names)


def _of_client(table: pd.DataFrame, client: int | None, folder: Path) -> pd.DataFrame:
    """Return the rows of a client, or of all test data, in a table of predictions."""
    if "model" not in table:  # from before clients were named
        table = table.assign(client=np.nan, model="global")
    is_whole = table["model"].isin(["global", "mean"])
    if client is None:
        return table[is_whole]
    own = table[table["client"] == client]
    if own.empty:
        raise FlsuiteError(
            f"{folder / 'predictions.csv'} has no samples of client {client}; name a client with "
            "test data, or repeat flsuite predict if the file is from an older version"
        )
    by_own_model = own[own["model"] == str(client)]
    return by_own_model if len(by_own_model) else own[is_whole]


def count_pairs(targets: np.ndarray, predictions: np.ndarray, names: list[str]) -> pd.DataFrame:
    """Count the samples by true class (row) and predicted class (column)."""
    counts = np.zeros((len(names), len(names)), dtype=int)
    np.add.at(counts, (targets, predictions), 1)
    return pd.DataFrame(counts, index=names, columns=names)
