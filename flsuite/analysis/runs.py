"""A run's tables, the scores by which experiments are compared, and the budget of a tuning."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flsuite.analysis.panels import AXES
from flsuite.common import score_names
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.files import unescaped
from flsuite.runs.record import TUNING_COLUMNS

_WORDS = dict.fromkeys(("scope", "split", "metric"), "category")  # few distinct values, many rows
_COLUMNS = (*AXES, *_WORDS, "value")


def is_metrics(path: Path) -> bool:
    """Return whether a file has the columns of a run's ``metrics.csv``."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return tuple(file.readline().strip().split(",")) == _COLUMNS


def read_metrics(run_dir: str | Path) -> pd.DataFrame:
    """Read ``metrics.csv`` of a run.

    Its columns are ``round, virtual_s, wall_s, client_updates, bytes, scope, split, metric,
    value``. Scope, split and metric are categories of text.

    Raises:
        FlsuiteError: If the table is missing or does not belong to a run.
    """
    path = Path(run_dir) / "metrics.csv"
    table = read_table(path, _WORDS, grows=True)
    if missing := [name for name in _COLUMNS if name not in table]:
        raise FlsuiteError(
            f"{path} is not the table of a run: it lacks the columns {', '.join(missing)}"
        )
    _require_numbers(table, path)
    for name in _WORDS:  # pandas parses words as numbers if all of them can be
        table[name] = table[name].cat.rename_categories(lambda word: unescaped(str(word)))
    return table


def read_partition(run_dir: str | Path) -> pd.DataFrame:
    """Read ``partition.csv`` of a run: columns ``client, split, class, samples``.

    Raises:
        FlsuiteError: If the table is missing or damaged.
    """
    path = Path(run_dir) / "partition.csv"
    types = {"client": "int64", "split": str, "class": str, "samples": "int64"}
    table = typed(read_table(path, {"class": "str"}), types, path)
    has_train = (table["split"] == "train").any()
    if not has_train or table.duplicated(["client", "split", "class"]).any():
        what = "a row occurs twice" if has_train else "it has no training samples"
        raise FlsuiteError(f"{path} is damaged ({what}); restore it, or leave the folder out")
    return table.assign(**{"class": table["class"].map(unescaped)})


def read_table(
    path: Path, types: Mapping[str, str] | None = None, grows: bool = False
) -> pd.DataFrame:
    """Read a table of a run.

    Args:
        path: The file.
        types: Types of columns by name. The types of other columns are guessed.
        grows: Whether a run appends to it. An incomplete last line, from a kill or a write in
            progress, is then left out, because a part of a number looks like a number.

    Raises:
        FlsuiteError: If the file is missing or not a table.
    """
    if not path.is_file():
        raise FlsuiteError(f"{path.parent} is not the folder of a run: it has no {path.name}")
    try:
        source = _whole_lines(path) if grows else path
        return pd.read_csv(source, dtype=dict(types or {}))
    except (ValueError, pd.errors.ParserError) as error:  # also bytes that are not text
        raise FlsuiteError(f"{path} cannot be read as a table ({one_line(error)})") from error


def typed(table: pd.DataFrame, types: Mapping[str, Any], path: Path) -> pd.DataFrame:
    """Return the table with its columns converted to these types.

    Raises:
        FlsuiteError: If a column is missing or cannot be converted.
    """
    try:
        return table.astype(dict(types))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FlsuiteError(
            f"{path} is damaged ({one_line(error, 120)}); restore it, or leave the folder out"
        ) from error


def _whole_lines(path: Path) -> Path | io.BytesIO:
    """Return the content of a file without an incomplete last line."""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        if file.read() == b"\n":
            return path  # saves a second copy in memory
    content = path.read_bytes()
    return io.BytesIO(content[: content.rfind(b"\n") + 1])


def _require_numbers(table: pd.DataFrame, path: Path) -> None:
    """Refuse a table with an invalid number.

    Raises:
        FlsuiteError: If there is one. The message names its line and column.
    """
    if table.empty:
        return
    for name in (*AXES, "value"):
        numbers = pd.to_numeric(table[name], errors="coerce")
        bad = numbers.isna() & table[name].notna()
        if name == "round":
            bad = ~np.isfinite(numbers)
        if bad.any() or not pd.api.types.is_numeric_dtype(table[name]):
            row = int(bad.argmax())
            raise FlsuiteError(
                f"{path}, line {row + 2}, column {name!r}: expected a number, got "
                f"{table[name].iloc[row]!r}; restore the file, or leave the folder out"
            )


def curve(table: pd.DataFrame, metric: str, split: str, x: str = "round") -> pd.Series:
    """Return a global score, indexed by the column ``x``.

    Raises:
        FlsuiteError: If a round has the score twice.
    """
    rows = _are_of_score(table, metric, split)
    rounds = table["round"].to_numpy()[rows]
    if len(np.unique(rounds)) < len(rounds):
        twice = pd.Series(rounds)[pd.Series(rounds).duplicated()].iloc[0]
        raise FlsuiteError(
            f"a run has two values of {split} {metric} in round {twice}: "
            "its metrics.csv is damaged, or a callback logs it twice; leave its folder out"
        )
    # By columns, because selecting rows takes ten times as long, and a sweep has thousands of runs.
    values, index = table["value"].to_numpy()[rows], table[x].to_numpy()[rows]
    return pd.Series(values, index=pd.Index(index, name=x), name="value")


def score_rows(table: pd.DataFrame, metric: str, split: str) -> pd.DataFrame:
    """Return the rows of a global score."""
    return table[_are_of_score(table, metric, split)]


def _are_of_score(table: pd.DataFrame, metric: str, split: str) -> np.ndarray:
    """Return a mask of the rows of a global score."""
    wanted = {"split": split, "metric": metric, "scope": "global"}
    return np.logical_and.reduce(
        [(table[name] == word).to_numpy() for name, word in wanted.items()]
    )


def logged(tables: Iterable[pd.DataFrame], split: str, scope: str | None = "global") -> list[str]:
    """Return the names of the numbers that any of these tables has on a split.

    Args:
        tables: Metrics of runs.
        split: ``train``, ``val`` or ``test``.
        scope: ``global``, a client's number, or ``None`` for all clients.
    """
    names: dict[str, None] = {}
    for table in tables:
        is_own = table["scope"] != "global" if scope is None else table["scope"] == scope
        rows = (is_own & (table["split"] == split)).to_numpy()
        names |= dict.fromkeys(table.loc[rows, "metric"].unique())
    return list(names)


def logged_scores(
    tables: Iterable[pd.DataFrame], monitor: str, splits: Sequence[str] = ("test", "val")
) -> list[str]:
    """Return the global scores that any of these runs has logged, on any of these splits.

    The monitor comes first, see :func:`~flsuite.common.score_names.main_scores`.
    """
    names = dict.fromkeys(n for table in tables for split in splits for n in logged([table], split))
    return score_names.main_scores(names, monitor)


def run_scores(table: pd.DataFrame, metric: str, monitor: str, last: int) -> dict[str, float]:
    """Return the test scores of one run, or nothing if it has no such score.

    Args:
        table: The metrics of the run.
        metric: The score.
        monitor: The validation score that picks a round.
        last: Number of rounds in ``mean_last``.

    Returns:
        ``last`` is the score in the last round, NaN if that round has none. ``picked`` is the score
        in the round with the best ``monitor`` on validation data, the first on a tie. ``mean_last``
        is the mean over the last rounds. ``best_on_test`` is only for comparison with published
        tables that report it, since it is picked on test data.
    """
    table = of_last_task(table)
    test, validation = curve(table, metric, "test"), curve(table, monitor, "val")
    if test.empty:
        return {}
    # A diverged model may have no score in the last round. An earlier one must not replace it.
    rounds = table["round"][(table["split"] == "test") & (table["scope"] == "global")]
    test = test.reindex(test.index.union([rounds.max()]))
    scores = {
        "last": float(test.iloc[-1]),
        "mean_last": float(test.iloc[-last:].mean(skipna=False)),
    }

    validation = validation[validation.index.isin(test.index)].dropna()
    if len(validation):
        losses = validation if score_names.lower_is_better(monitor) else -validation
        picked = validation.index[int(losses.argmin())]  # the first on a tie
        scores |= {"picked": float(test[picked]), "picked_round": float(picked)}

    if (lower := score_names.lower_is_better(metric)) is not None:
        scores["best_on_test"] = float(test.min() if lower else test.max())
    return scores


def of_last_task(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rounds of the last task of a sequence, or all rounds if there are no tasks.

    Scores after different tasks cover different classes.
    """
    tasks = curve(table, "task", "train")
    return table[table["round"].isin(tasks.index[tasks == tasks.max()])] if len(tasks) else table


def files_of_sweeps(places: Iterable[str | Path], name: str) -> list[Path]:
    """Return the files with a name in the folders of sweeps in or above ``places``."""
    roots = [Path(place).resolve() for place in places]
    # A sweep's folder holds its cells, and a cell holds its runs.
    above = [folder / name for root in roots for folder in list(root.parents)[:2]]
    below = [path for root in roots for path in root.rglob(name)]
    return sorted({*below, *(path for path in above if path.is_file())})


def read_tuning(places: Iterable[str | Path]) -> pd.DataFrame | None:
    """Return the number of trials of each method at each grid point, and the chosen values.

    Args:
        places: Folders of a sweep or its cells, or folders above sweeps.

    Returns:
        One row per method and grid point: ``method, grid point, trials, values, score``. The last
        two describe the chosen trial, and are empty until there is one. ``None`` without tuning.

    Raises:
        FlsuiteError: If a table of the tuning has other columns.
    """
    tables = [_budget(path) for path in files_of_sweeps(places, "tuning.csv")]
    return pd.concat(tables, ignore_index=True) if tables else None


def _budget(path: Path) -> pd.DataFrame:
    table = read_table(path, {"grid point": "str", "values": "str", "chosen": "str"})
    if missing := [name for name in TUNING_COLUMNS if name not in table]:
        raise FlsuiteError(
            f"{path} is not the table of a sweep's tuning: it lacks the columns "
            f"{', '.join(missing)}"
        )
    table = table.fillna({"grid point": "", "values": ""})
    for name in ("method", "grid point"):
        table[name] = table[name].astype(str).map(unescaped)
    is_chosen = table["chosen"].str.lower().isin(["1", "true", "yes"])
    rows = []
    for (method, point), trials in table.groupby(["method", "grid point"], sort=False):
        best = trials[is_chosen[trials.index]].head(1)
        chosen = (best["values"].iloc[0], best["score"].iloc[0]) if len(best) else ("", "")
        rows.append((method, point, int(trials["score"].notna().sum()), *chosen))
    return pd.DataFrame(rows, columns=["method", "grid point", "trials", "values", "score"])
