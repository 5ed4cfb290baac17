"""All numbers of many runs as one tidy table."""

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from flsuite.analysis.groups import Group, find_runs, group_runs
from flsuite.analysis.panels import AXES
from flsuite.analysis.runs import logged
from flsuite.common.errors import FlsuiteError

_RUN_COLUMNS = ("run", "method", "partition", "seed")
_NAMES = ("scope", "split", "metric")
_COLUMNS = (*_RUN_COLUMNS, *AXES, *_NAMES, "value")


class Results(pd.DataFrame):
    """The numbers of runs, one per row. It is a DataFrame with one additional method.

    Columns: ``run`` (its folder), ``method``, ``partition``, ``seed``, then the columns of a run's
    ``metrics.csv``: ``round, virtual_s, wall_s, client_updates, bytes, scope, split, metric,
    value``. All words are categories. ``attrs["monitors"]`` maps a run to the validation score that
    picks its round.
    """

    @property
    def _constructor(self) -> type["Results"]:
        return Results

    def wide(self) -> pd.DataFrame:
        """Return one row per run, round and scope, and one column per number.

        The columns of the run and of the clock come first. The number columns are named
        ``<split>/<metric>``, such as ``test/accuracy``.
        """
        rows = self.groupby(["run", "round", "scope"], observed=True, sort=False).ngroup()
        pairs = self.groupby(["split", "metric"], observed=True, sort=False).ngroup()
        values = np.full((rows.max() + 1 if len(rows) else 0, pairs.nunique()), np.nan)
        values[rows.to_numpy(), pairs.to_numpy()] = self["value"].to_numpy()

        names = self.loc[~pairs.duplicated(), ["split", "metric"]].astype(str)
        columns = (names["split"] + "/" + names["metric"]).tolist()
        keys = pd.DataFrame(self.loc[~rows.duplicated(), [*_RUN_COLUMNS, *AXES, "scope"]])
        numbers = pd.DataFrame(values, columns=columns, index=keys.index)
        return pd.concat([keys, numbers], axis=1).reset_index(drop=True)


def load(*places: str | Path | Iterable[str | Path]) -> Results:
    """Read the runs in and below folders as one tidy table.

    Runs that differ only in the seed have the same ``method`` and ``partition``. A method is named
    after its aggregator and the settings in which methods differ, a partition after its class and
    parameters.

    Args:
        places: Folders of runs or sweeps, or lists of folders.

    Raises:
        FlsuiteError: If no run has a finished round.
    """
    folders = [[place] if isinstance(place, (str, Path)) else place for place in places]
    return results_of(group_runs(find_runs(chain.from_iterable(folders))))


def results_of(groups: Sequence[Group]) -> Results:
    """Return the numbers of groups of runs as one table."""
    runs = [(group, folder) for group in groups for folder in group.runs]
    tables = [group.runs[folder] for group, folder in runs]
    sizes = [len(table) for table in tables]
    seeds = [group.seeds[folder] for group, folder in runs]
    columns: dict[str, object] = {
        "run": _repeated([short_path(folder) for _, folder in runs], sizes),
        "method": _repeated([group.method for group, _ in runs], sizes),
        "partition": _repeated([group.partition for group, _ in runs], sizes),
        "seed": np.repeat(pd.array(seeds, dtype="Int64"), sizes),
    }
    columns |= {name: np.concatenate([table[name] for table in tables]) for name in AXES}
    for name in _NAMES:
        columns[name] = pd.api.types.union_categoricals([table[name] for table in tables])
    columns["value"] = np.concatenate([table["value"] for table in tables])
    results = Results(columns)
    results.attrs["monitors"] = {short_path(folder): group.monitor for group, folder in runs}
    return results


def only(
    results: pd.DataFrame, metric: str, split: str = "test", scope: str | None = "global"
) -> pd.DataFrame:
    """Return the rows of one score.

    Args:
        results: A table from :func:`load`, or a part of it.
        metric: The score.
        split: ``train``, ``val`` or ``test``.
        scope: ``global``, a client's number, or ``None`` for all clients.

    Raises:
        FlsuiteError: If there are no such rows.
    """
    require_results(results)
    of_scope = results["scope"] != "global" if scope is None else results["scope"] == scope
    rows = results[(results["split"] == split) & of_scope & (results["metric"] == metric)]
    if rows.empty:
        whose, names = scope or "client", sorted(logged([results], split, scope))
        raise FlsuiteError(
            f"no run has the {whose} {split} score {metric!r}; there are "
            f"{', '.join(names) or 'none'}"
        )
    return rows


def run_tables(results: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the global numbers of each run."""
    of_all = results[results["scope"] == "global"]
    return [table for _, table in of_all.groupby("run", observed=True)]


def client_numbers(rows: pd.DataFrame) -> pd.Series:
    """Return the clients of rows whose scopes are clients, as integers."""
    # By text, because the categories include "global".
    return rows["scope"].astype(str).astype(int)


def require_results(results: object) -> None:
    """Refuse anything except a table from :func:`load`."""
    columns = list(results.columns) if isinstance(results, pd.DataFrame) else []
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise FlsuiteError(
            f"expected a table from flsuite.analysis.load; this {type(results).__name__} lacks the "
            f"columns {', '.join(missing)}"
        )


def _repeated(names: Sequence[str], sizes: Sequence[int]) -> pd.Categorical:
    """Return a category per row, from one name and the number of rows per run."""
    categories = list(dict.fromkeys(names))
    codes = [categories.index(name) for name in names]
    return pd.Categorical.from_codes(np.repeat(codes, sizes), pd.Index(categories))


def short_path(folder: Path) -> str:
    """Return the path of a folder, relative to the working folder if it lies below it."""
    here = Path.cwd()
    return os.path.relpath(folder, here) if folder.is_relative_to(here) else str(folder)
