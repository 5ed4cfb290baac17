"""Figures of the clients' data: partitions, task sequences and forgetting."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsuite.analysis.panels import (
    by_experiment,
    class_colors,
    legend_outside,
    matrices_figure,
    new_figure,
    panel_grid,
    tidy,
)
from flsuite.analysis.results import require_results
from flsuite.analysis.runs import read_partition
from flsuite.common.errors import FlsuiteError

_MOST_CLIENTS = 200
_MOST_PLANS = 100  # clients with a drawn task plan
_OF_TASKS = ("accuracy on a client's task", "after its task")  # names of the axes


def partition_figure(table: pd.DataFrame, split: str = "train") -> Figure:
    """Draw classes against clients, with dots whose area is the number of samples.

    The bars above show the samples per client.

    Args:
        table: A table from :func:`flsuite.runs.partition.partition_table`.
        split: ``train``, ``val`` or ``test``.
    """
    of_all = class_counts(table, split)
    counts = of_all.head(_MOST_CLIENTS).T
    classes, clients = counts.shape
    width, height = 1.8 + 0.42 * clients, 2.0 + 0.34 * classes
    figure = new_figure(min(max(5.0, width), 24), min(max(3.6, height), 16))
    sizes, mix = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(1.6, classes / 4)])

    sizes.bar(range(clients), counts.sum(), color="#4c72b0", width=0.7)
    sizes.set_ylabel("samples")
    tidy(sizes, grid=None)

    stacked = counts.stack()
    y, x = (stacked.index.codes[level] for level in (0, 1))
    largest = max(float(counts.to_numpy().max()), 1.0)
    mix.scatter(
        x, y, s=stacked.to_numpy() / largest * 320, color="#dd8452", alpha=0.85, linewidths=0
    )
    _name_axes(mix, [_short(str(name)) for name in counts.index], clients)
    step = max(1, clients // 25)
    mix.set_xticks(range(0, clients, step), [str(client) for client in counts.columns[::step]])
    mix.set_ylabel("class")

    total, samples = len(of_all), int(of_all.sum().sum())
    shown = "" if total <= _MOST_CLIENTS else f", the first {_MOST_CLIENTS} shown"
    title = f"{split}: {samples:,} samples, {total} client{'s' * (total > 1)}{shown}"
    areas = f"areas: samples of a class, the largest is {largest:,.0f}"
    figure.suptitle(f"{title}\n{areas}", fontsize=11)
    return figure


def _name_axes(panel: Axes, names: Sequence[str], clients: int) -> None:
    """Name the classes from the top down, make room for all clients, and add a grid below."""
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlim(-0.7, clients - 0.3)
    panel.set_xlabel("client")
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def partitions_figure(results: pd.DataFrame, split: str = "train", clients: int = 60) -> Figure:
    """Draw the partitions side by side, with a bar per client and a color per class.

    Each panel shows the partition of its first run, with the :func:`label_skew` in the title.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        split: ``train``, ``val`` or ``test``.
        clients: Maximum number of clients to show, starting with client 0.
    """
    require_results(results)
    of_partition = results.groupby("partition", observed=True)["run"].first()
    figure, panels = panel_grid(len(of_partition), (4.2, 3.0), shares_y=True)
    highest = 0.0
    for panel, (name, run) in zip(panels, of_partition.items(), strict=True):
        table = read_partition(run)
        counts = class_counts(table, split)
        shown = counts.head(clients)
        below = np.zeros(len(shown))
        for label, color in zip(shown, class_colors(shown.shape[1]), strict=True):
            samples = shown[label]
            panel.bar(shown.index, samples, bottom=below, width=0.85, color=color, label=label)
            below += samples.to_numpy()
        panel.set_title(f"{name}: label skew {label_skew(counts):.2f}", fontsize=10)
        # Bars without height would otherwise keep the axis from ending above the others.
        highest = max(highest, float(below.max()))
        panel.set(xlabel="client", ylabel=f"{split} samples", ylim=(0, 1.04 * highest))
        tidy(panel, grid=None)

    handles, labels = panels[0].get_legend_handles_labels()
    if len(labels) <= 20:
        short = [_short(label, 18) for label in labels]
        legend_outside(figure, "right center", handles, short, fontsize=7)
    return figure


def class_counts(table: pd.DataFrame, split: str = "train") -> pd.DataFrame:
    """Return the samples of each client, with a column per class in the order of the table."""
    rows = table[table["split"] == split]
    counts = rows.pivot(index="client", columns="class", values="samples")
    return counts.reindex(columns=rows["class"].unique())


def label_skew(counts: pd.DataFrame) -> float:
    """Return the mean distance between the clients' class shares and the overall class shares.

    The distance is the total variation: the share of a client's samples that would have to change
    their class. It is 0 if all clients have the same mix, and near 1 if each client has its own
    class among many.

    Args:
        counts: Samples, with clients as rows and classes as columns.
    """
    samples = counts[counts.sum(axis=1) > 0].to_numpy(dtype=float)
    shares = samples / samples.sum(axis=1, keepdims=True)
    overall = samples.sum(axis=0) / samples.sum()
    return float(np.abs(shares - overall).sum(axis=1).mean() / 2)


def task_plan_figure(table: pd.DataFrame) -> Figure:
    """Draw the task in which a client gets a class, with classes against clients.

    Later tasks are darker.

    Args:
        table: A table from :func:`flsuite.runs.partition.task_table`.
    """
    shown = table[table["client"] < _MOST_PLANS]
    # In the order of the task pool, if there is one.
    names = list(dict.fromkeys(shown.sort_values(["task", "client"])["class"]))
    clients, tasks = shown["client"].nunique(), int(shown["task"].max()) + 1
    width, height = 1.8 + 0.42 * clients, 1.2 + 0.34 * len(names)
    figure = new_figure(min(max(4.5, width), 24), min(max(3.0, height), 16))
    panel = figure.subplots()

    colors = colormaps["viridis_r"]
    for client, task, name in zip(shown["client"], shown["task"], shown["class"], strict=True):
        y, shade = names.index(name), (task + 1) / tasks
        panel.scatter(client, y, s=170, marker="s", color=colors(shade), linewidths=0)
        color = "white" if shade > 0.5 else "black"
        panel.text(client, y, str(task), ha="center", va="center", fontsize=8, color=color)

    _name_axes(panel, names, clients)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_title("the task in which a client gets a class", fontsize=10)
    return figure


def forgetting_figure(results: pd.DataFrame) -> Figure:
    """Draw the accuracy on each task after each task, one panel per method and partition.

    Rows are the tasks trained on, and columns are the tasks scored. A column that gets paler toward
    the bottom is a forgotten task. Values are means over clients and seeds.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.

    Raises:
        FlsuiteError: If no run has tasks.
    """
    matrices = {
        title: matrix
        for title, rows in by_experiment(_task_rows(results)).items()
        if not (matrix := _task_matrix(rows)).empty
    }
    rows, columns = (max(matrix.shape[axis] for matrix in matrices.values()) for axis in (0, 1))
    size = 1.4 + 0.5 * columns, 1.3 + 0.45 * rows
    return matrices_figure(matrices, size, *_OF_TASKS)


def task_figure(matrix: np.ndarray) -> Figure:
    """Draw the accuracy on each task after each task of one run.

    Args:
        matrix: ``(tasks done, tasks)``. Rows are the tasks trained on, and columns are the tasks
            scored.
    """
    done, tasks = matrix.shape
    size = 1.6 + 0.62 * tasks, 1.3 + 0.5 * done
    return matrices_figure({"": pd.DataFrame(matrix)}, size, *_OF_TASKS)


def _task_rows(results: pd.DataFrame) -> pd.DataFrame:
    require_results(results)
    is_score = results["metric"].astype(str).str.startswith("task_accuracy/")
    rows = results[is_score & (results["scope"] == "global")]
    if rows.empty:
        raise FlsuiteError(
            "forgetting_figure: no run has accuracies by task; train on data with tasks "
            "(TaskSequence), to the end of a task"
        )
    return rows


def _task_matrix(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over runs, with tasks done as rows and tasks scored as columns."""
    numbered = pd.DataFrame(rows[["run", "round", "value"]])
    numbered["task"] = rows["metric"].astype(str).str.removeprefix("task_accuracy/").astype(int)
    # A run's n-th round with such scores is the end of its n-th task.
    numbered["after"] = numbered.groupby("run", observed=True)["round"].rank("dense").astype(int)
    numbered["after"] -= 1
    return numbered.pivot_table(index="after", columns="task", values="value", aggfunc="mean")
