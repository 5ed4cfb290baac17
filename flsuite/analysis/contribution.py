"""The table and the figure of what each client adds to a federation."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsuite.analysis.panels import new_figure

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
        table[name], table[f"{name}_std"], table[f"{name}_values"] = (
            own.mean(),
            own.std(),
            own.size(),
        )
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

    def of_a_run(rows: pd.DataFrame) -> float:
        first, second = (rows[name].rank() for name in names)
        is_unknown = min(first.nunique(), second.nunique()) < 2 or len(rows) < _FEWEST
        return float("nan") if is_unknown else float(first.corr(second))

    means = _by_run(values)
    return pd.Series({run: of_a_run(rows) for run, rows in means.groupby("run")}, dtype=float)


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
