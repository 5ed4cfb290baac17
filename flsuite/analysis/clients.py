"""Figures of single clients: their scores over the rounds, and their gain from federation."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.panels import (
    by_experiment,
    color_range,
    draw_client_rounds,
    legend_right,
    panel_grid,
)
from flsuite.analysis.results import client_numbers, only
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
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
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
