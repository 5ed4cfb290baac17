"""A figure of how a dataset is split among clients."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

__all__ = ["partition_figure"]

_MOST_CLIENTS = 200


def partition_figure(table: pd.DataFrame, split: str = "train") -> Figure:
    """Draw classes against clients, with dots whose area is the number of samples.

    The bars above are the samples per client.

    Args:
        table: As :func:`flsuite.runs.partition.partition_table` returns it.
        split: ``train``, ``val`` or ``test``.
    """
    rows = table[table["split"] == split]
    clients_shown = np.sort(rows["client"].unique())[:_MOST_CLIENTS]
    shown_rows = rows[rows["client"].isin(clients_shown)]
    counts = shown_rows.pivot(index="class", columns="client", values="samples")
    counts = counts.reindex(rows["class"].unique())
    classes, clients = counts.shape
    figure = Figure(
        figsize=(min(max(5.0, 1.8 + 0.42 * clients), 24), min(max(3.6, 2.0 + 0.34 * classes), 16)),
        layout="constrained",
    )
    sizes, mix = figure.subplots(2, 1, sharex=True, height_ratios=[1, max(1.6, classes / 4)])

    sizes.bar(range(clients), counts.sum(), color="#4c72b0", width=0.7)
    sizes.set_ylabel("samples")
    sizes.spines[["top", "right"]].set_visible(False)

    stacked = counts.stack()
    y, x = (stacked.index.codes[level] for level in (0, 1))
    largest = max(float(counts.to_numpy().max()), 1.0)
    mix.scatter(
        x, y, s=stacked.to_numpy() / largest * 320, color="#dd8452", alpha=0.85, linewidths=0
    )
    mix.set_yticks(range(classes), [_short(str(name)) for name in counts.index])
    mix.set_ylim(classes - 0.4, -0.6)
    mix.set_xlim(-0.7, clients - 0.3)
    step = max(1, clients // 25)
    mix.set_xticks(range(0, clients, step), [str(client) for client in counts.columns[::step]])
    mix.set_xlabel("client")
    mix.set_ylabel("class")
    mix.grid(alpha=0.25)
    mix.set_axisbelow(True)

    total = rows["client"].nunique()
    shown = "" if total <= _MOST_CLIENTS else f", the first {_MOST_CLIENTS} shown"
    figure.suptitle(f"{split}: {int(rows['samples'].sum())} samples, {total} clients{shown}")
    return figure


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
