"""The table and the figure of what each client adds to a federation."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Values = Mapping[int, Sequence[float]]
"""The contributions of clients, one per run or per order of joining."""


def contribution_table(samples: Values, values: Mapping[str, Values]) -> pd.DataFrame:
    """Return a row per client, with the mean and spread of its contribution by each method.

    Args:
        samples: Training samples of each client, one number per run.
        values: Column name to contributions.
    """
    rows = []
    for client, sizes in sorted(samples.items()):
        row: dict[str, float] = {"client": client, "samples": sum(sizes) / len(sizes)}
        for name, of_clients in values.items():
            own = pd.Series(of_clients[client], dtype=float)
            row |= {name: own.mean(), f"{name}_std": own.std(), f"{name}_values": len(own)}
        rows.append(row)
    return pd.DataFrame(rows)


def rank_correlation(table: pd.DataFrame, names: Sequence[str]) -> float:
    """Return Spearman's rank correlation of two columns, NaN if one of them is constant."""
    first, second = (table[name].rank() for name in names)
    return float(first.corr(second)) if min(first.nunique(), second.nunique()) > 1 else float("nan")


def contribution_figure(table: pd.DataFrame, title: str, names: Sequence[str]) -> Figure:
    """Draw the contributions as bars with their spread, and two methods against each other.

    Args:
        table: ``contribution.csv``.
        title: What is drawn.
        names: Its columns of contributions, one or two.
    """
    wide = max(4.0, 0.4 * len(table) + 2)
    figure = Figure(figsize=(wide * len(names) + 3.4 * (len(names) - 1), 3.2), layout="constrained")
    widths = [wide] * len(names) + [3.4] * (len(names) - 1)
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=False):
        _bars(axes, table, name)
    if len(names) == 2:
        _against(panels[-1], table, names)
    figure.suptitle(title, fontsize=10)
    return figure


def _bars(axes: Axes, table: pd.DataFrame, name: str) -> None:
    spread = table[f"{name}_std"] if table[f"{name}_std"].notna().all() else None
    axes.bar(table["client"].astype(str), table[name], yerr=spread, color="tab:blue")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="client", ylabel=name)


def _against(axes: Axes, table: pd.DataFrame, names: Sequence[str]) -> None:
    axes.scatter(table[names[0]], table[names[1]], s=14)
    for row in table.itertuples():
        place = getattr(row, names[0]), getattr(row, names[1])
        axes.annotate(str(row.client), place, xytext=(3, 3), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.set_title(f"rank correlation {rank_correlation(table, names):.2f}", fontsize=9)
