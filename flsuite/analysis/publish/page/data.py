"""The data of the page, gathered from runs and thinned for the charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from flsuite.analysis.clients import client_gains, final_scores
from flsuite.analysis.curves import gamma_parts, seed_curves
from flsuite.analysis.panels import AXES
from flsuite.analysis.partition import class_counts
from flsuite.analysis.report import target_points
from flsuite.analysis.results import client_numbers, only
from flsuite.analysis.runs import logged, read_partition
from flsuite.common.errors import FlsuiteError

# The page stays below 2 MB, including 1.2 MB for the chart library.
_CURVE_ROWS = 6000
_MAP_ROWS = 9000
_CLIENT_ROWS = 3000
_MIX_ROWS = 3000
_MOST_CLIENTS = 60


@dataclass
class PageData:
    """The tables behind the charts.

    Attributes:
        methods: All methods, in the order of their colors.
        partitions: All partitions.
        score: The title of the score in all charts except the curves.
        axis: The default axis.
        tables: A table per chart. An empty or missing one has no chart.

            - ``curves``: ``method, partition, metric, axis, x, mean, low, high``;
            - ``gamma``: the same for gamma and its parts;
            - ``targets``: ``method, partition, seed, axis, x``: where a run reaches its partition's
              target, empty if it does not;
            - ``differences``: pairs of :func:`~flsuite.analysis.compare` with an interval;
            - ``map``: ``method, partition, client, round, value`` of one run each;
            - ``spread``: ``method, partition, seed, client, value``: the last score, for as many
              seeds as fit;
            - ``gains``: the table from :func:`~flsuite.analysis.client_gains`;
            - ``mix``: ``partition, client, class, index, samples``.
    """

    methods: list[str]
    partitions: list[str]
    score: str
    axis: str
    tables: dict[str, pd.DataFrame]


def gather(
    results: pd.DataFrame,
    metrics: Sequence[str],
    split: str,
    axis: str,
    targets: Mapping[str, float],
    pairs: pd.DataFrame,
) -> PageData:
    """Return the tables of the page.

    Args:
        results: A table from :func:`~flsuite.analysis.load`.
        metrics: The scores. All charts except the curves show the first one.
        split: The data of the curves and of the target.
        axis: The default axis.
        targets: The score to reach, by partition.
        pairs: The table from :func:`~flsuite.analysis.compare`.
    """
    metric = metrics[0]
    tables = {
        "curves": _curves(results, {f"{split} {name}": (name, split) for name in metrics}),
        "gamma": _curves(results, {name: (name, "train") for name in gamma_parts(results)}),
        "differences": pairs.dropna(subset=["low", "high"]),
        "mix": _mix(results),
    }
    if targets:
        tables["targets"] = _targets(results, targets, metric, split)
    if metric in logged([results], "test", scope=None):
        tables |= {
            "map": _client_rounds(results, metric),
            "spread": _of_first_seeds(final_scores(results, metric)),
            "gains": _gains(results, metric),
        }
    methods, partitions = (results[name].unique() for name in ("method", "partition"))
    score = f"test {metric.replace('_', ' ')}"
    return PageData([*map(str, methods)], [*map(str, partitions)], score, axis, tables)


def _curves(results: pd.DataFrame, shown: dict[str, tuple[str, str]]) -> pd.DataFrame:
    """Return mean and range of the seeds, on every axis.

    Args:
        results: All results.
        shown: Metric and split by name in the menu.
    """
    parts = []
    for name, (metric, split) in shown.items():
        rows = only(results, metric, split)
        for (method, partition), own in rows.groupby(["method", "partition"], observed=True):
            for x in AXES:
                curves = seed_curves(own, x)
                numbers = {
                    "x": curves.index * AXES[x].scale,
                    "mean": curves.mean(axis=1),
                    "low": curves.min(axis=1),
                    "high": curves.max(axis=1),
                }
                names = {"method": method, "partition": partition, "metric": name, "axis": x}
                parts.append(pd.DataFrame(numbers).dropna().assign(**names))

    most = max(12, _CURVE_ROWS // max(1, len(parts)))
    parts = [part.iloc[_spread(len(part), most)] for part in parts if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _targets(
    results: pd.DataFrame, targets: Mapping[str, float], metric: str, split: str
) -> pd.DataFrame:
    """Return where each run reaches its partition's target, one row per axis."""
    points = pd.concat(
        [
            target_points(results[results["partition"] == name], target, metric, split)
            for name, target in targets.items()
        ]
    )
    for x in AXES:
        points[x] = points[x].astype(float) * AXES[x].scale
    names = ["method", "partition", "seed"]
    return points.melt(id_vars=names, value_vars=list(AXES), var_name="axis", value_name="x")


def _client_rounds(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the clients' scores over the rounds, for the first run per method and partition."""
    rows = only(results, metric, scope=None)
    groups = rows.groupby(["method", "partition"], observed=True)
    first = rows[rows["run"].isin(groups["run"].first())]
    table = pd.DataFrame(first[["method", "partition", "round", "value"]])
    table["client"] = client_numbers(first)
    table = table[table["client"].isin(sorted(table["client"].unique())[:_MOST_CLIENTS])]

    per_round = max(1, len(groups) * table["client"].nunique())
    rounds = np.sort(table["round"].unique())
    kept = rounds[_spread(len(rounds), max(4, _MAP_ROWS // per_round))]
    return table[table["round"].isin(kept)]


def _gains(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    alone = [name for name in results["method"].unique() if str(name).startswith("LocalOnly")]
    if len(alone) != 1:
        return pd.DataFrame()
    try:
        return _of_first_seeds(client_gains(results, metric, over=str(alone[0])))
    except FlsuiteError:  # it shares no seed with the others
        return pd.DataFrame()


def _of_first_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of as many seeds as fit. If one seed is too large, cut its clients."""
    seeds = sorted(table["seed"].unique())
    sizes = table.groupby("seed").size().reindex(seeds).cumsum()
    table = table[table["seed"].isin(sizes.index[: max(1, int((sizes <= _CLIENT_ROWS).sum()))])]
    if len(table) > _CLIENT_ROWS:
        share = _CLIENT_ROWS / len(table)
        clients = sorted(table["client"].unique())
        table = table[table["client"].isin(clients[: max(1, int(share * len(clients)))])]
    return table


def _mix(results: pd.DataFrame) -> pd.DataFrame:
    """Return the training samples by client and class, for the first run per partition."""
    parts = []
    of_partition = results.groupby("partition", observed=True)["run"].first()
    for partition, run in of_partition.items():
        counts = class_counts(read_partition(run)).head(_MOST_CLIENTS)
        if counts.size * len(of_partition) > _MIX_ROWS:
            counts = counts.head(max(5, _MIX_ROWS // (counts.shape[1] * len(of_partition))))
        long = counts.reset_index().melt(id_vars="client", var_name="class", value_name="samples")
        index = {name: n for n, name in enumerate(counts.columns)}
        long["index"] = long["class"].map(index)
        parts.append(long[long["samples"] > 0].assign(partition=str(partition)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _spread(number: int, most: int) -> np.ndarray:
    """Return at most ``most`` evenly spread positions, including the first and the last."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).round().astype(int))
