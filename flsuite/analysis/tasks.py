"""Figures of tasks in sequence: who meets what when, and what is forgotten."""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flsuite.analysis.panels import by_experiment, draw_matrix, panel_grid
from flsuite.analysis.results import require_results
from flsuite.errors import FlsuiteError

_MOST_CLIENTS = 100


def task_plan_figure(table: pd.DataFrame) -> Figure:
    """Draw classes against clients: the task in which a client meets a class.

    Later tasks are darker.

    Args:
        table: As :func:`flsuite.runs.partition.task_table` returns it.
    """
    shown = table[table["client"] < _MOST_CLIENTS]
    # In the order of the pool of tasks, if there is one.
    names = list(dict.fromkeys(shown.sort_values(["task", "client"])["class"]))
    clients, tasks = shown["client"].nunique(), int(shown["task"].max()) + 1
    figure = Figure(
        figsize=(
            min(max(4.5, 1.8 + 0.42 * clients), 24),
            min(max(3.0, 1.2 + 0.34 * len(names)), 16),
        )
    )
    panel = figure.subplots()

    colors = colormaps["viridis_r"]
    for client, task, name in zip(shown["client"], shown["task"], shown["class"], strict=True):
        y, shade = names.index(name), (task + 1) / tasks
        panel.scatter(client, y, s=170, marker="s", color=colors(shade), linewidths=0)
        color = "white" if shade > 0.5 else "black"
        panel.text(client, y, str(task), ha="center", va="center", fontsize=8, color=color)

    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlim(-0.7, clients - 0.3)
    panel.set_xlabel("client")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.set_title("the task in which a client meets a class", fontsize=10)
    figure.set_layout_engine("constrained")
    return figure


def forgetting_figure(results: pd.DataFrame) -> Figure:
    """Draw the accuracy on each task after each task, one panel per method and partition.

    Rows are the tasks trained on, and columns are the tasks scored. A column that gets paler
    towards the bottom is a task that is forgotten. Values are means over clients and seeds.

    Args:
        results: What :func:`~flsuite.analysis.load` returns.

    Raises:
        FlsuiteError: If no run has tasks.
    """
    matrices = {
        title: matrix
        for title, rows in by_experiment(_task_rows(results)).items()
        if not (matrix := _task_matrix(rows)).empty
    }
    rows, columns = (max(matrix.shape[axis] for matrix in matrices.values()) for axis in (0, 1))
    figure, panels = panel_grid(len(matrices), (1.4 + 0.5 * columns, 1.3 + 0.45 * rows))
    for panel, (title, matrix) in zip(panels, matrices.items(), strict=True):
        image = draw_matrix(panel, matrix)
        panel.set(xlabel="accuracy on a client's task", ylabel="after its task")
        panel.set_title(title, fontsize=10)
    figure.colorbar(image, ax=panels)
    return figure


def task_figure(matrix: np.ndarray) -> Figure:
    """Draw the accuracy on each task after each task of one run.

    Args:
        matrix: ``(tasks done, tasks)``. Rows are the tasks trained on, and columns are the tasks
            scored.
    """
    done, tasks = matrix.shape
    figure, (panel,) = panel_grid(1, (1.6 + 0.62 * tasks, 1.3 + 0.5 * done))
    image = draw_matrix(panel, pd.DataFrame(matrix))
    panel.set(xlabel="accuracy on a client's task", ylabel="after its task")
    figure.colorbar(image, ax=panel)
    return figure


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
