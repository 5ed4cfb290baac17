"""CSV files of numbers, and how their columns are scaled.

In error messages, rows are counted from 1 below the header.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flsuite.common.errors import FlsuiteError, refused_as

if TYPE_CHECKING:
    import pandas as pd


ScaleName = Literal["minmax", "standard", "none"]
_LOW, _HIGH = 0.1, 0.9


def fit_scale(name: ScaleName, train: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a map of rows ``(rows, columns)``, in float64 or float32, fitted to training rows.

    ``minmax`` scales training rows to [0.1, 0.9] and clips all rows to [0, 1]. The margin keeps
    values slightly outside the training rows off the bounds. ``standard`` scales training rows
    to mean 0 and deviation 1. ``none`` changes nothing. A column that is constant in the training
    rows carries no information and becomes 0.5 (``minmax``) or 0 (``standard``) everywhere. The map
    works in place, because large tables fit into memory only once.
    """
    if name == "none":
        return lambda x: x
    low, high = train.min(0).astype(np.float64), train.max(0).astype(np.float64)
    offset, divisor, base, middle = low, (high - low) / (_HIGH - _LOW), _LOW, 0.5
    if name == "standard":
        offset, divisor = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
        base = middle = 0.0

    # Both are needed: a repeated 0.1 has a nonzero deviation, and 1e-300 has deviation 0.
    is_constant = (low == high) | (divisor == 0)
    divisors = np.where(is_constant, np.inf, divisor)
    bases = np.where(is_constant, middle, base)

    def scale(x: np.ndarray) -> np.ndarray:
        x -= offset
        x /= divisors
        x += bases
        return np.clip(x, 0.0, 1.0, out=x) if name == "minmax" else x

    return scale


def csv_header(file: Path) -> list[str]:
    """Return the column names exactly as in the file.

    Pandas itself would rename a second ``a`` to ``a.1``.

    Raises:
        FlsuiteError: If the file is missing, empty or unreadable, a column has no name or a
            duplicate name, or the first row has more values than the header has names. In the last
            case, pandas would take the first values for row names and shift all others.
    """
    import pandas as pd

    if not file.is_file():
        raise FlsuiteError(f"there is no file {file}")
    with _readable(file):
        # As text, and without default missing values: NA may be the name of a column. The second
        # row shows whether rows are longer than the header.
        try:
            first = pd.read_csv(file, header=None, nrows=2, dtype=str, keep_default_na=False)
        except pd.errors.EmptyDataError as error:
            raise FlsuiteError(f"{file} is empty; put the data there or remove it") from error

    names = [str(name).strip() for name in first.iloc[0]]
    if "" in names:  # usually row numbers, which reveal the class of sorted rows
        raise FlsuiteError(
            f"{file} has no name for column {names.index('') + 1}; name it or remove it"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FlsuiteError(f"{file} has more than one column named {twice!r}; rename or remove one")
    return names


def csv_frames(file: Path, rows: int | None = None) -> "Iterator[pd.DataFrame]":
    """Yield the file in frames of ``rows`` rows. The last frame may be shorter.

    By default, there is one frame.

    Raises:
        FlsuiteError: While reading, for the reasons of :func:`csv_header`, or if the file has no
            rows or a row that is longer than the header.
    """
    import pandas as pd

    csv_header(file)
    total = 0
    # low_memory=True would infer a column's type in pieces, which may disagree.
    options: dict[str, Any] = {"iterator": True, "chunksize": rows, "low_memory": False}
    with _readable(file), pd.read_csv(file, **options) as reader:
        for frame in [reader.read()] if rows is None else reader:
            total += len(frame)
            if len(frame):
                yield frame
    if not total:
        raise FlsuiteError(f"{file} has a header but no rows; put the data there or remove it")


def _readable(file: Path) -> AbstractContextManager[None]:
    return refused_as(f"{file} cannot be read as CSV", "fix or remove it")


_LARGEST = float(np.finfo(np.float32).max)


def numeric_chunks(frames: "Iterable[pd.DataFrame]", file: Path) -> Iterator[np.ndarray]:
    """Yield each frame as float64 ``(rows, columns)``.

    Missing values are counted to the end, so the message can state their number. Earlier chunks are
    therefore known to be valid only after the last one.

    Raises:
        FlsuiteError: If a cell is missing, not a number, infinite or too large for float32.
    """
    names: list[str] = []
    gaps = first_gap = np.zeros(1, np.int64)  # one per column after the first frame
    row = 1
    for frame in frames:
        names = [str(name) for name in frame.columns]
        x = _numbers(frame, file, row)
        _check_size(x, names, file, row)
        # argmax is the first missing row of a column, if there is one.
        missing = np.isnan(x)
        first_gap = np.where((gaps == 0) & missing.any(0), row + missing.argmax(0), first_gap)
        gaps = gaps + missing.sum(0)
        row += len(x)
        yield x

    if gaps.any():
        column = int(np.flatnonzero(gaps)[0])
        others = int((gaps > 0).sum()) - 1
        raise missing_values(file, names[column], int(gaps[column]), int(first_gap[column]), others)


def missing_values(file: Path, column: str, rows: int, first: int, others: int = 0) -> FlsuiteError:
    """Return the error for a column with missing values.

    Args:
        file: The file.
        column: The first column with missing values.
        rows: Rows without a value in that column.
        first: The first of these rows.
        others: Further columns with missing values.
    """
    also = f", and in {others} other column{'s' * (others > 1)}" if others else ""
    return FlsuiteError(
        f"{file}: row {first}, column {column!r}: the value is missing (in {rows} "
        f"row{'s' * (rows > 1)} of this column{also}); fill in or remove those rows"
    )


def is_number(column: "pd.Series") -> bool:
    """Return whether a column was read as numbers throughout.

    Truth values count as 0 and 1.
    """
    from pandas.api.types import is_numeric_dtype

    return is_numeric_dtype(column.dtype)


def has_numbers(column: "pd.Series") -> bool:
    """Return whether a column has at least one number."""
    return bool(is_number(column) or _parsed(column).notna().any())


def _parsed(column: "pd.Series") -> "pd.Series":
    """Return a column of text as float64, NaN where a value is missing or not a number."""
    import pandas as pd

    return pd.to_numeric(column.astype(str), errors="coerce")


def _numbers(frame: "pd.DataFrame", file: Path, row: int) -> np.ndarray:
    """Return float64 ``(rows, columns)``, NaN where a value is missing.

    The first row of ``frame`` is ``row`` of the file.
    """
    texts = [name for name in frame.columns if not is_number(frame[name])]
    if texts:
        frame = frame.assign(**{name: _all_parsed(frame[name], file, row) for name in texts})
    return frame.to_numpy(dtype=np.float64, na_value=np.nan)


def _all_parsed(column: "pd.Series", file: Path, row: int) -> "pd.Series":
    """Return a column of text as float64.

    A value that is not a number is refused.
    """
    values = _parsed(column)
    wrong = (values.isna() & column.notna()).to_numpy()
    if wrong.any():
        at = int(wrong.argmax())
        raise FlsuiteError(
            f"{file}: row {row + at}, column {column.name!r}: expected a number, "
            f"got {str(column.iloc[at])!r}; correct it, or leave the column out"
        )
    return values


def _check_size(x: np.ndarray, names: list[str], file: Path, row: int) -> None:
    """Refuse a number that is infinite in float32."""
    large = np.abs(x) > _LARGEST
    if large.any():
        at, column = np.argwhere(large)[0].tolist()
        raise FlsuiteError(
            f"{file}: row {row + at}, column {names[column]!r}: expected a finite float32 number, "
            f"got {x[at, column]:g}; correct it or remove the row"
        )


def read_columns(
    path: str | Path, *layouts: tuple[str, ...], words: tuple[str, ...] = (), remedy: str = ""
) -> dict[str, np.ndarray]:
    """Return the columns of a CSV file of amounts as float64, in the order of its rows.

    Args:
        path: A CSV file with a header. A relative path is relative to the working directory.
        layouts: The accepted sets of columns, in any order.
        words: Columns of words, which are returned as text.
        remedy: What to do about other columns, for the message.

    Raises:
        FlsuiteError: If the file is missing, empty or unreadable, has other columns, or has a cell
            that is not a finite number of at least 0. Rows are counted from 1 below the header.
    """
    file = Path(path).expanduser()
    (frame,) = csv_frames(file)
    frame.columns = [str(name).strip() for name in frame.columns]
    layout = next((layout for layout in layouts if {*layout} == {*frame.columns}), None)
    if layout is None:
        expected = " or ".join(", ".join(layout) for layout in layouts)
        got = ", ".join(frame.columns)
        raise FlsuiteError(f"{file}: expected the columns {expected}, got {got}{remedy}")
    return {
        name: frame[name].fillna("").to_numpy(dtype=str)
        if name in words
        else _amounts(frame[name], file)
        for name in layout
    }


def whole_numbers(columns: Mapping[str, np.ndarray], name: str, file: Path) -> np.ndarray:
    """Return a column of :func:`read_columns` as int64, and refuse a cell that is not whole."""
    values = columns[name]
    refuse_cells(values >= 2**53, values, file, name, "a number below 2**53")
    refuse_cells(values % 1 != 0, values, file, name, "a whole number")
    return values.astype(np.int64)


def digest_of_columns(columns: Mapping[str, np.ndarray]) -> str:
    """Return a short digest of a file's columns, which becomes part of the run's settings."""
    digest = hashlib.sha256()
    for name, values in sorted(columns.items()):
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()[:12]


def digest_of_files(files: Iterable[Path]) -> str:
    """Return a short digest of the names and the bytes of files, for the run's settings."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _amounts(column: "pd.Series", file: Path) -> np.ndarray:
    """Return a column as float64, checked to be finite and at least 0."""
    import pandas as pd

    name = str(column.name)
    parsed = column
    if column.dtype.kind not in "iuf":
        parsed = pd.to_numeric(column.astype(str), errors="coerce")
    numbers = parsed.to_numpy(dtype=np.float64, na_value=np.nan)

    given = column.to_numpy(dtype=object)
    refuse_cells(column.isna().to_numpy(), given, file, name, "a number")
    refuse_cells(~np.isfinite(numbers), given, file, name, "a number")
    refuse_cells(numbers < 0, given, file, name, "a number of at least 0")
    return numbers


def refuse_cells(
    is_wrong: np.ndarray, values: np.ndarray, file: Path, column: str, expected: str
) -> None:
    """Raise an error for the first wrong row, if any."""
    if not is_wrong.any():
        return
    at = int(is_wrong.argmax())
    value = values[at]
    is_number = np.asarray(value).dtype.kind in "iuf"
    is_whole = is_number and abs(value) < 1e30 and value % 1 == 0
    got = f"{value:.0f}" if is_whole else f"{value:.15g}" if is_number else repr(str(value))
    if value != value or got == "''":  # pandas reads both as NaN
        got = "a missing value or NaN"
    raise FlsuiteError(f"{file}: row {at + 1}, column {column!r}: expected {expected}, got {got}")
