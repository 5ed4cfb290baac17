"""A figure of which client meets which classes in which task."""

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

__all__ = ["task_plan_figure"]

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
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.set_title("the task in which a client meets a class", fontsize=10)
    figure.set_layout_engine("constrained")
    return figure
