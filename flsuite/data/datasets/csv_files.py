"""CSV files with a header: their column names, and their rows in frames."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flsuite.errors import FlsuiteError, one_line

if TYPE_CHECKING:  # pandas takes half a second to import, which only users of tables should pay
    import pandas as pd

__all__ = ["csv_frames", "csv_header"]


def csv_header(file: Path) -> list[str]:
    """Return the column names as they are in the file.

    Pandas by itself would rename a second ``a`` to ``a.1``.

    Raises:
        FlsuiteError: If the file is missing, empty or unreadable, a column has no name or the name
            of another, or the first row has more values than the header has names. In the last
            case, pandas would take the first values for row names and shift all others.
    """
    import pandas as pd

    if not file.is_file():
        raise FlsuiteError(f"there is no file {file}")
    try:
        # As text, and without default missing values: NA may be the name of a column. The second
        # row shows whether rows are longer than the header.
        first = pd.read_csv(file, header=None, nrows=2, dtype=str, keep_default_na=False)
    except pd.errors.EmptyDataError as error:
        raise FlsuiteError(f"{file} is empty; put the data there or remove it") from error
    except Exception as error:  # decoding, disks and the parser have their own exceptions each
        raise _unreadable(file, error) from error

    names = [str(name).strip() for name in first.iloc[0]]
    if "" in names:  # usually row numbers, from which the class of sorted rows can be told
        raise FlsuiteError(
            f"{file} has no name for column {names.index('') + 1}; name it or remove it"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FlsuiteError(f"{file} has more than one column named {twice!r}; rename or remove one")
    return names


def csv_frames(file: Path, rows: int | None = None) -> "Iterator[pd.DataFrame]":
    """Yield the file in frames of ``rows`` rows, of which the last may be shorter.

    The default is one frame.

    Raises:
        FlsuiteError: While reading, if :func:`csv_header` raises it, or the file has no rows or a
            row that is longer than the header.
    """
    import pandas as pd

    csv_header(file)
    total = 0
    try:
        # low_memory=True would infer the type of a column from parts of it, which may disagree.
        with pd.read_csv(file, iterator=True, chunksize=rows, low_memory=False) as reader:
            for frame in [reader.read()] if rows is None else reader:
                total += len(frame)
                if len(frame):
                    yield frame
    except Exception as error:  # as in csv_header
        raise _unreadable(file, error) from error
    if not total:
        raise FlsuiteError(f"{file} has a header and no rows; put the data there or remove it")


def _unreadable(file: Path, error: Exception) -> FlsuiteError:
    return FlsuiteError(f"{file} cannot be read as CSV ({one_line(error)}); fix or remove it")
