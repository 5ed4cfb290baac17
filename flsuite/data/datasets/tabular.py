"""What tables read from files share: checked numbers, a split that holds for good, scaling fitted on training rows.

Rows are counted from 1 below the header wherever a message names one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from flsuite.errors import FlsuiteError

if TYPE_CHECKING:  # half a second that only those pay who read a table
    import pandas as pd

__all__ = [
    "ColumnScale",
    "ScaleName",
    "csv_frames",
    "csv_header",
    "every",
    "fit_scale",
    "is_number",
    "missing_values",
    "numeric_chunks",
    "one_line",
    "parsed",
]

ScaleName = Literal["minmax", "standard", "none"]
LOW, HIGH = 0.1, 0.9
LARGEST = float(np.finfo(np.float32).max)


def csv_header(file: Path) -> list[str]:
    """The column names as they stand in the file: pandas by itself renames a second ``a`` to ``a.1``.

    Raises:
        FlsuiteError: If the file is missing, empty or unreadable, a column has no name or another's, or the first row has
            more values than there are names: pandas would take the surplus for row names, and each value for its neighbour's.
    """
    import pandas as pd

    if not file.is_file():
        raise FlsuiteError(f"there is no file {file}")
    try:
        first = pd.read_csv(file, header=None, nrows=2, dtype=str, keep_default_na=False)
    except pd.errors.EmptyDataError as error:
        raise FlsuiteError(f"{file} is empty; put the data there or remove it") from error
    except (
        Exception
    ) as error:  # decoding, disks and the parser each have their own family of exceptions
        raise _unreadable(file, error) from error
    names = [str(name).strip() for name in first.iloc[0]]
    if "" in names:  # most often the row numbers, which tell the class of sorted rows
        raise FlsuiteError(
            f"{file} has no name for column {names.index('') + 1}; name it or remove it"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FlsuiteError(f"{file} has more than one column named {twice!r}; rename or remove one")
    return names


def csv_frames(file: Path, rows: int | None = None) -> "Iterator[pd.DataFrame]":
    """The file in frames of ``rows`` rows, the last one shorter; in one frame by default.

    Raises:
        FlsuiteError: On the way, if :func:`csv_header` does, or the file has no rows or a row longer than the header.
    """
    import pandas as pd

    csv_header(file)
    found = 0
    try:
        with pd.read_csv(file, iterator=True, chunksize=rows, low_memory=False) as reader:
            for frame in [reader.read()] if rows is None else reader:
                found += len(frame)
                if len(frame):
                    yield frame
    except Exception as error:  # as above
        raise _unreadable(file, error) from error
    if not found:
        raise FlsuiteError(f"{file} has a header and no rows; put the data there or remove it")


def _unreadable(file: Path, error: Exception) -> FlsuiteError:
    return FlsuiteError(f"{file} cannot be read as CSV ({one_line(error)}); mend or remove it")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def numeric_chunks(frames: "Iterable[pd.DataFrame]", file: Path) -> Iterator[np.ndarray]:
    """Each frame as float64 ``(rows, columns)``, all of it finite by the time the last one is out.

    Gaps are counted to the end, so that the message can say how many there are; what came before it is not to be used.

    Raises:
        FlsuiteError: If a cell is no number, is infinite or too large for float32, or is missing.
    """
    names: list[str] = []
    gaps = first_gap = np.zeros(0, np.int64)
    row = 1
    for frame in frames:
        if not names:
            names = [str(name) for name in frame.columns]
            gaps = first_gap = np.zeros(len(names), np.int64)
        x = _numbers(frame, file, row)
        _check_size(x, names, file, row)
        missing = np.isnan(x)
        first_gap = np.where((gaps == 0) & missing.any(0), row + missing.argmax(0), first_gap)
        gaps = gaps + missing.sum(0)
        row += len(x)
        yield x
    if gaps.any():
        column = int(np.flatnonzero(gaps)[0])
        raise missing_values(
            file,
            names[column],
            int(gaps[column]),
            int(first_gap[column]),
            int((gaps > 0).sum()) - 1,
        )


def missing_values(file: Path, column: str, rows: int, first: int, others: int = 0) -> FlsuiteError:
    also = f", and in {others} other column{'s' * (others > 1)}" if others else ""
    return FlsuiteError(
        f"{file} has missing values in column {column!r} in {rows} row{'s' * (rows > 1)}, first in row {first}{also}; "
        "fill in or remove those rows"
    )


def is_number(column: "pd.Series") -> bool:
    """Whether it was read as numbers throughout; truth values count as 0 and 1."""
    from pandas.api.types import is_numeric_dtype

    return is_numeric_dtype(column.dtype)


def parsed(column: "pd.Series") -> "pd.Series":
    """A column of text as float64, NaN where it is missing or no number."""
    import pandas as pd

    return pd.to_numeric(column.astype(str), errors="coerce")


def _numbers(frame: "pd.DataFrame", file: Path, row: int) -> np.ndarray:
    """Float64 ``(rows, columns)``, NaN where a value is missing; the first row of ``frame`` is ``row`` of the file."""
    texts = [name for name in frame.columns if not is_number(frame[name])]
    if texts:
        frame = frame.assign(**{name: _parsed_whole(frame[name], file, row) for name in texts})
    return frame.to_numpy(dtype=np.float64, na_value=np.nan)


def _parsed_whole(column: "pd.Series", file: Path, row: int) -> "pd.Series":
    values = parsed(column)
    wrong = (values.isna() & column.notna()).to_numpy()
    if wrong.any():
        at = int(wrong.argmax())
        raise FlsuiteError(
            f"{file} has no number but {str(column.iloc[at])!r} in column {column.name!r}, row {row + at}; "
            "correct it, or leave the column out"
        )
    return values


def _check_size(x: np.ndarray, names: list[str], file: Path, row: int) -> None:
    large = np.abs(x) > LARGEST
    if large.any():
        at, column = np.argwhere(large)[0].tolist()
        raise FlsuiteError(
            f"{file} has {x[at, column]:g} in column {names[column]!r}, row {row + at}, which is infinite or beyond float32; "
            "correct it or remove the row"
        )


def every(samples: int, fraction: float) -> np.ndarray:
    """Bool ``(samples,)``: true at every ``1 / fraction``-th place, ``floor(samples * fraction)`` times.

    A place has its answer whatever the number of samples: with places in a random order that grows at the end only,
    what is held out of a smaller sample is held out of a larger one too.
    """
    share = np.floor(np.arange(samples + 1) * fraction + 1e-9)  # 0.29 * 100 lies just below 29
    return np.diff(share) > 0


@dataclass(frozen=True)
class ColumnScale:
    """``base + (x - offset) / divisor`` for each column, then cut to ``bounds``.

    Attributes:
        offset, divisor, base: float64 ``(columns,)``. An infinite divisor maps a column to its base.
        bounds: The least and the largest value that comes out; ``None`` for no cut.
    """

    offset: np.ndarray
    divisor: np.ndarray
    base: np.ndarray
    bounds: tuple[float, float] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Scale ``(rows, columns)``, float64 or float32, in place: a large table has no room for a second one."""
        x -= self.offset
        x /= self.divisor
        x += self.base
        return x if self.bounds is None else np.clip(x, *self.bounds, out=x)


def fit_scale(name: ScaleName, train: np.ndarray) -> ColumnScale:
    """The scaling of that name, from training rows ``(rows, columns)`` and from nothing else.

    ``minmax`` brings training rows to [0.1, 0.9]. Other rows may lie outside and are cut at 0 and 1: the margin keeps
    what is somewhat beyond the training rows apart from their ends. ``standard`` brings training rows to mean 0 and
    deviation 1. ``none`` leaves them as they are. A column that is constant in training, of which nothing can be learnt,
    becomes 0.5 (``minmax``) or 0 (``standard``) everywhere.
    """
    columns = train.shape[1]
    zeros, ones = np.zeros(columns), np.ones(columns)
    if name == "none":
        return ColumnScale(zeros, ones, zeros)
    low, high = train.min(0).astype(np.float64), train.max(0).astype(np.float64)
    if name == "standard":
        offset, divisor, base = (
            train.mean(0, dtype=np.float64),
            train.std(0, dtype=np.float64),
            zeros,
        )
    else:
        offset, divisor, base = low, (high - low) / (HIGH - LOW), ones * LOW
    constant = (low == high) | (
        divisor == 0
    )  # the deviation of 0.1 over and over is not quite 0, that of 1e-300 is
    middle = 0.0 if name == "standard" else 0.5
    bounds = None if name == "standard" else (0.0, 1.0)
    return ColumnScale(
        offset, np.where(constant, np.inf, divisor), np.where(constant, middle, base), bounds
    )
