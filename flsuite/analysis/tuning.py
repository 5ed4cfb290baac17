"""The budget of a sweep's tuning, from the sweep's ``tuning.csv``."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from flsuite.analysis.runs import read_table
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import unescaped

_COLUMNS = ("method", "grid point", "trial", "values", "score", "chosen")


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
    roots = [Path(place).resolve() for place in places]
    # A sweep's folder holds its cells, and a cell holds its runs.
    paths = {path for root in roots for path in root.rglob("tuning.csv")}
    paths |= {
        folder / "tuning.csv"
        for root in roots
        for folder in list(root.parents)[:2]
        if (folder / "tuning.csv").is_file()
    }
    tables = [_budget(path) for path in sorted(paths)]
    return pd.concat(tables, ignore_index=True) if tables else None


def _budget(path: Path) -> pd.DataFrame:
    table = read_table(path, {"grid point": "str", "values": "str", "chosen": "str"})
    if missing := [name for name in _COLUMNS if name not in table]:
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
