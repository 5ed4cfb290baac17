"""A run's tables."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from flsuite.errors import FlsuiteError, one_line

__all__ = ["curve", "is_metrics", "read_metrics", "read_partition", "read_table", "score_rows"]

_LATER_COLUMNS = ("client_updates", "bytes")  # those that runs of earlier versions do not have
_COLUMNS = ("round", "virtual_s", "wall_s", *_LATER_COLUMNS, "scope", "split", "metric", "value")
_EARLIER_COLUMNS = tuple(name for name in _COLUMNS if name not in _LATER_COLUMNS)
_WORDS = dict.fromkeys(("scope", "split", "metric"), "category")  # few different ones, many rows


def is_metrics(path: Path) -> bool:
    """Return whether a file has the columns of a run's ``metrics.csv``."""
    with path.open() as file:
        return tuple(file.readline().strip().split(",")) in (_COLUMNS, _EARLIER_COLUMNS)


def read_metrics(run_dir: str | Path) -> pd.DataFrame:
    """Read ``metrics.csv`` of a run.

    Its columns are ``round, virtual_s, wall_s, client_updates, bytes, scope, split, metric,
    value``. Scope, split and metric are categories of text. A run of an earlier version has no
    ``client_updates`` and ``bytes``, and they are empty.

    Raises:
        FlsuiteError: If the table is not there, or is not that of a run.
    """
    path = Path(run_dir) / "metrics.csv"
    table = read_table(path, _WORDS)
    if missing := [name for name in _EARLIER_COLUMNS if name not in table]:
        raise FlsuiteError(
            f"{path} is not the table of a run: it lacks the columns {', '.join(missing)}"
        )
    for name in _WORDS:  # pandas takes words for numbers where all of them could be
        table[name] = table[name].cat.rename_categories(str)
    return table.reindex(columns=list(_COLUMNS))


def read_partition(run_dir: str | Path) -> pd.DataFrame:
    """Read ``partition.csv`` of a run: columns ``client, split, class, samples``."""
    return read_table(Path(run_dir) / "partition.csv").astype({"class": str})


def read_table(path: Path, types: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Read a table of a run.

    Args:
        path: The file.
        types: Types of columns, by name, where they are not to be guessed.

    Raises:
        FlsuiteError: If it is not there, or is no table.
    """
    if not path.is_file():
        raise FlsuiteError(f"{path.parent} is not the folder of a run: it has no {path.name}")
    try:
        return pd.read_csv(path, dtype=dict(types or {}))
    except (ValueError, pd.errors.ParserError) as error:  # also bytes that are no text
        raise FlsuiteError(f"{path} cannot be read as a table ({one_line(error)})") from error


def curve(
    table: pd.DataFrame, metric: str, split: str, scope: str = "global", x: str = "round"
) -> pd.Series:
    """Return a score, indexed by the column ``x``."""
    rows = _are_of_score(table, metric, split, scope)
    # Columns, because a table of the rows takes ten times as long, and a sweep has thousands.
    values, index = table["value"].to_numpy()[rows], table[x].to_numpy()[rows]
    return pd.Series(values, index=pd.Index(index, name=x), name="value")


def score_rows(table: pd.DataFrame, metric: str, split: str, scope: str = "global") -> pd.DataFrame:
    """Return the rows of a score."""
    return table[_are_of_score(table, metric, split, scope)]


def _are_of_score(table: pd.DataFrame, metric: str, split: str, scope: str) -> np.ndarray:
    """Return which rows are of a score."""
    wanted = {"split": split, "metric": metric, "scope": scope}
    return np.logical_and.reduce(
        [(table[name] == word).to_numpy() for name, word in wanted.items()]
    )
