"""The files of a table, the checks of their columns, and the columns in use."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flsuite.common.errors import FlsuiteError, likeliest, one_line
from flsuite.data.datasets.csv_files import (
    csv_frames,
    has_numbers,
    is_number,
    missing_values,
    numeric_chunks,
)

if TYPE_CHECKING:
    import pandas as pd

_SUFFIXES = (".csv", ".parquet")
_MOST_NAMED = 8

Frames = list["tuple[Path, pd.DataFrame]"]
"""Files and their content, ordered by file name."""


def read_frames(path: Path) -> Frames:
    """Read a file, or all files of a folder.

    Raises:
        FlsuiteError: If there is no such file, or one is damaged or empty.
    """
    if not path.exists():
        raise FlsuiteError(
            f"there is no file or folder {path}; set data.path, which is relative to data.root"
        )

    candidates = path.iterdir() if path.is_dir() else [path]
    files = sorted(
        file
        for file in candidates
        if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")
    )

    if not files:
        what = "has no file" if path.is_dir() else "is not a file"
        raise FlsuiteError(
            f"{path} {what} whose name ends in {' or '.join(_SUFFIXES)}; "
            "set data.path to one, or convert it"
        )

    return [(file, _read_frame(file)) for file in files]


def _read_frame(file: Path) -> "pd.DataFrame":
    if file.suffix.lower() == ".parquet":
        return _read_parquet(file)
    (frame,) = csv_frames(file)
    return frame


def _read_parquet(file: Path) -> "pd.DataFrame":
    import pandas as pd

    try:
        # Drop the index, where pandas may have stored row names. It is not a column.
        frame = pd.read_parquet(file, engine="pyarrow").reset_index(drop=True)
    except ImportError as error:
        raise FlsuiteError(
            f"reading {file} needs pyarrow: pip install flsuite[parquet], or save it as CSV"
        ) from error
    except Exception as error:  # pyarrow and disks each have their own exceptions
        raise FlsuiteError(
            f"{file} cannot be read as Parquet ({one_line(error)}); fix or remove it"
        ) from error
    if frame.empty:
        raise FlsuiteError(f"{file} has no rows; put the data there or remove it")
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def feature_columns(
    frames: Frames, label: str, features: Sequence[str] | None, client: str | None
) -> list[str]:
    """Return the names of the features, after checking each file's header.

    Args:
        frames: Files and their content.
        label: The column of labels.
        features: The chosen columns. ``None`` means all numeric columns.
        client: The column of owners, if any.

    Raises:
        FlsuiteError: If a column is missing, files differ in their columns, or no column is
            numeric.
    """
    first_file, first = frames[0]
    owner = [] if client is None else [client]
    for file, frame in frames:
        for role, names in (("label", [label]), ("client", owner), ("features", features or [])):
            for name in names:
                _check_column(name, role, file, list(frame.columns))
        if features is None and (difference := sorted({*frame.columns} ^ {*first.columns})):
            raise FlsuiteError(
                f"{file} and {first_file} differ in their columns: {_listed(difference)} in one of "
                "them only; fix the header, or name the columns to use in data.features"
            )
    if features is not None:
        return list(features)

    # One number is enough, so a column with a bad cell is reported, not silently ignored.
    others = [label, *owner]
    chosen = [
        name
        for name in first.columns
        if name not in others and any(has_numbers(frame[name]) for _, frame in frames)
    ]
    if not chosen:
        raise FlsuiteError(
            f"{first_file} has no numeric column besides {_listed(others)}; "
            "name some in data.features"
        )
    return chosen


def _check_column(name: str, role: str, file: Path, columns: list[str]) -> None:
    """Refuse a column that is not in the file, and suggest similar names."""
    if name not in columns:
        near = likeliest(name, columns, _MOST_NAMED, cutoff=0.5)
        hint = f"the nearest are {_listed(near)}" if near else f"it has {_listed(columns)}"
        raise FlsuiteError(f"{file} has no column {name!r}; set data.{role} to another ({hint})")


def _listed(names: Sequence[str]) -> str:
    """Return the first few names, quoted, and the number of remaining names."""
    more = len(names) - _MOST_NAMED
    return ", ".join(map(repr, names[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


def take_columns(
    frames: Frames, features: list[str], label: str, client: str | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the features, labels and owners of all files together.

    Returns:
        Features float64 ``(n, features)``, labels ``(n,)`` and owners ``(n,)``. Labels and owners
        are int64 or text. Owners are ``None`` without a column of owners.

    Raises:
        FlsuiteError: If a value is missing, or cannot be a feature, a label or an owner.
    """
    x: list[np.ndarray] = []
    labels, owners = [], []
    for file, frame in frames:
        x.extend(numeric_chunks([frame[features]], file))
        labels.append(_names(file, frame[label]))
        if client is not None:
            owners.append(_names(file, frame[client]))

    joined = x[0] if len(x) == 1 else np.concatenate(x)
    return joined, _joined(labels), _joined(owners) if owners else None


def _names(file: Path, column: "pd.Series") -> np.ndarray:
    """Return names of classes or owners ``(n,)``: int64 if all are whole numbers, else text."""
    missing = column.isna().to_numpy()
    if missing.any():
        raise missing_values(file, str(column.name), int(missing.sum()), int(missing.argmax()) + 1)
    if not is_number(column) or column.dtype == bool:
        return column.astype(str).to_numpy(dtype=str)

    # A single integer written as 9.0 makes the whole column floats.
    values = column.to_numpy(dtype=np.float64)
    wrong = (values != np.rint(values)) | np.isinf(values)
    if wrong.any():
        at = int(wrong.argmax())
        raise FlsuiteError(
            f"{file}: row {at + 1}, column {column.name!r}: expected a whole number or a word, "
            f"got {values[at]:g}; name another column, or turn its numbers into classes"
        )
    return column.to_numpy(dtype=np.int64)


def _joined(columns: list[np.ndarray]) -> np.ndarray:
    """Join columns.

    The result is whole numbers only if all columns are.
    """
    if any(column.dtype.kind == "U" for column in columns):
        columns = [column.astype(str) for column in columns]
    return np.concatenate(columns)
