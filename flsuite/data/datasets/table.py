"""Any table of numbers with a column of labels, from CSV or Parquet files."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from flsuite.data.datasets.tabular import (
    ScaleName,
    csv_frames,
    every,
    fit_scale,
    is_number,
    missing_values,
    numeric_chunks,
    one_line,
    parsed,
)
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Table", "read_table"]

SPLIT_SEED = 0
SUFFIXES = (".csv", ".parquet")
MOST_NAMED = 8

Read = list["tuple[Path, pd.DataFrame]"]
"""The files with their content, in the order of their names."""


@dataclass
class Rows:
    """Features float64 ``(n, features)``, labels and, where they are named, owners ``(n,)`` as whole numbers or as text."""

    x: np.ndarray
    label: np.ndarray
    owner: np.ndarray | None


def read_table(
    path: Path,
    label: str,
    features: Sequence[str] | None = None,
    client: str | None = None,
    test_path: Path | None = None,
    test_fraction: float = 0.2,
    scale: ScaleName = "minmax",
) -> PublishedSplits:
    """Read a table; the arguments are those of :class:`Table`, with whole paths.

    Returns:
        ``train`` and ``test`` with features float32 ``(n, features)``, scaled as the training rows ask for it, labels
        int64 ``(n,)`` in the order of the class names, and the owners, numbered in the order of their names, as ids
        where ``client`` is given; no ``val``.

    Raises:
        FlsuiteError: If a file, a column or a value is missing, a feature is no number or infinite, files differ in their
            columns, there is one class only, or the test rows have a class that the training rows have not.
    """
    train_files = _read(path)
    test_files = [] if test_path is None else _read(test_path)
    columns = _columns([*train_files, *test_files], label, features, client)
    rows = _together(
        [_rows(file, frame, columns, label, client) for file, frame in (*train_files, *test_files)]
    )
    names, y = np.unique(rows.label, return_inverse=True)
    if len(names) < 2:
        raise FlsuiteError(
            f"column {label!r} of {path} has the same label in all rows, {names[0]}; name another data.label"
        )
    owners = None if rows.owner is None else np.unique(rows.owner, return_inverse=True)[1]
    if test_path is None:
        held = _hold_out(y, owners, test_fraction)
        if not held.any():
            raise FlsuiteError(
                f"no row of {path} can be held out for testing: it has {len(y)} rows; raise data.test_fraction"
            )
    else:
        held = np.arange(len(y)) >= sum(len(frame) for _, frame in train_files)
        _check_classes(y, held, names, test_path)
    return PublishedSplits(
        DataSpec((len(columns),), len(names), class_names=tuple(map(str, names))),
        *_scaled(rows.x, y, owners, held, scale),
    )


def _read(path: Path) -> Read:
    """The file, or those of a folder."""
    if not path.exists():
        raise FlsuiteError(
            f"there is no file or folder {path}; set data.path, which is relative to data.root"
        )
    found = path.iterdir() if path.is_dir() else [path]
    files = sorted(
        file for file in found if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        what = "holds no file" if path.is_dir() else "is no file"
        raise FlsuiteError(
            f"{path} {what} whose name ends in {' or '.join(SUFFIXES)}; set data.path to one, or convert it"
        )
    return [(file, _frame(file)) for file in files]


def _frame(file: Path) -> "pd.DataFrame":
    if file.suffix.lower() == ".parquet":
        return _parquet(file)
    (frame,) = csv_frames(file)
    return frame


def _parquet(file: Path) -> "pd.DataFrame":
    import pandas as pd

    try:
        frame = pd.read_parquet(file, engine="pyarrow").reset_index(drop=True)
    except ImportError as error:
        raise FlsuiteError(
            f"reading {file} takes pyarrow: pip install flsuite[parquet], or save it as CSV"
        ) from error
    except Exception as error:  # pyarrow and disks each have their own family of exceptions
        raise FlsuiteError(
            f"{file} cannot be read as Parquet ({one_line(error)}); mend or remove it"
        ) from error
    if frame.empty:
        raise FlsuiteError(f"{file} has no rows; put the data there or remove it")
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _columns(
    read: Read, label: str, features: Sequence[str] | None, client: str | None
) -> list[str]:
    """The features, after a look at the header of each file."""
    first_file, first = read[0]
    others = [label] if client is None else [label, client]
    for file, frame in read:
        for role, names in (
            ("label", [label]),
            ("client", others[1:]),
            ("features", features or ()),
        ):
            for name in names:
                _check_column(name, role, file, list(frame.columns))
        if features is None and (difference := sorted({*frame.columns} ^ {*first.columns})):
            raise FlsuiteError(
                f"{file} and {first_file} differ in their columns: {_listed(difference)} in one of them only; "
                "mend the header, or name the columns to use in data.features"
            )
    chosen = (
        list(features)
        if features is not None
        else [name for name in _numeric(read) if name not in others]
    )
    if not chosen:
        raise FlsuiteError(
            f"{first_file} has no numeric column besides {_listed(others)}; name some in data.features"
        )
    return chosen


def _check_column(name: str, role: str, file: Path, columns: list[str]) -> None:
    if name not in columns:
        near = difflib.get_close_matches(name, columns, MOST_NAMED, cutoff=0.5)
        hint = f"the nearest are {_listed(near)}" if near else f"it has {_listed(columns)}"
        raise FlsuiteError(f"{file} has no column {name!r}; set data.{role} to another ({hint})")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(map(repr, names[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


def _numeric(read: Read) -> list[str]:
    """Columns with a number in them. One bad cell does not make a column text: it is found when the numbers are taken."""
    return [
        name
        for name in read[0][1].columns
        if any(is_number(frame[name]) or parsed(frame[name]).notna().any() for _, frame in read)
    ]


def _rows(
    file: Path, frame: "pd.DataFrame", columns: list[str], label: str, client: str | None
) -> Rows:
    (x,) = numeric_chunks([frame[columns]], file)
    return Rows(
        x, _values(file, frame[label]), None if client is None else _values(file, frame[client])
    )


def _values(file: Path, column: "pd.Series") -> np.ndarray:
    """Names of classes or owners ``(n,)``: int64 where they are whole numbers, else text."""
    missing = column.isna().to_numpy()
    if missing.any():
        raise missing_values(file, str(column.name), int(missing.sum()), int(missing.argmax()) + 1)
    if not is_number(column) or column.dtype == bool:
        return column.astype(str).to_numpy(dtype=str)
    values = column.to_numpy(dtype=np.float64)
    wrong = (values != np.rint(values)) | np.isinf(values)
    if wrong.any():
        at = int(wrong.argmax())
        raise FlsuiteError(
            f"{file} has {values[at]:g} in column {column.name!r}, row {at + 1}, where a whole number or a word should be; "
            "name another column, or turn its numbers into classes"
        )
    return column.to_numpy(dtype=np.int64)


def _together(parts: list[Rows]) -> Rows:
    owners = [part.owner for part in parts if part.owner is not None]
    x = np.concatenate([part.x for part in parts]) if len(parts) > 1 else parts[0].x
    return Rows(x, _joined([part.label for part in parts]), _joined(owners) if owners else None)


def _joined(columns: list[np.ndarray]) -> np.ndarray:
    """Whole numbers only if they are so in all files."""
    if any(column.dtype.kind == "U" for column in columns):
        columns = [column.astype(str) for column in columns]
    return np.concatenate(columns)


def _hold_out(y: np.ndarray, owners: np.ndarray | None, fraction: float) -> np.ndarray:
    """Bool ``(n,)``, the test rows: the fraction of each owner's and each class's rows, but for rounding.

    The rows are sorted by owner and class, at random within, and each ``1 / fraction``-th is held out. A class of which
    nothing would be left to train on is not held out.
    """
    draws = numpy_generator(SPLIT_SEED, "table/test").random(len(y))
    order = np.lexsort((draws, y) if owners is None else (draws, y, owners))
    held = np.zeros(len(y), dtype=bool)
    held[order] = every(len(y), fraction)
    return held & np.isin(y, y[~held])


def _check_classes(y: np.ndarray, held: np.ndarray, names: np.ndarray, test_path: Path) -> None:
    unknown = np.setdiff1d(y[held], y[~held])
    if len(unknown):
        raise FlsuiteError(
            f"{test_path} has rows of class {names[unknown[0]]}, which the training rows have not; "
            "remove them, or add such rows to data.path"
        )


def _scaled(
    x: np.ndarray, y: np.ndarray, owners: np.ndarray | None, held: np.ndarray, name: ScaleName
) -> tuple[DataSplit, DataSplit]:
    """Training and test split. Scaled in float64: a column of large numbers close together has few digits in float32."""
    scale = fit_scale(name, x[~held])
    train, test = (
        DataSplit(
            torch.from_numpy(scale(x[rows]).astype(np.float32)),
            torch.from_numpy(y[rows].astype(np.int64)),
            None if owners is None else torch.from_numpy(owners[rows].astype(np.int64)),
        )
        for rows in (~held, held)
    )
    return train, test


class Table(FederatedDataModule):
    """A CSV or Parquet file, or a folder of such files, with a column of labels.

    Labels that are words become classes in the order of the alphabet, numbers in theirs. A value that is missing or cannot
    be used is an error that names it: nothing is filled in, no row is dropped.

    Args:
        path: The file, ``.csv`` with commas and a header, or ``.parquet`` (``pip install flsuite[parquet]``), or a folder, of
            which all such files are read as one table. Where it is not absolute, it is looked for in ``root``; without
            one, in the working folder, then in ``$FLSUITE_DATA_ROOT``.
        label: The column of labels: words or whole numbers.
        features: The columns to learn from. Default: all that have numbers in them, but ``label`` and ``client``; columns of
            text are left out.
        client: The column that says whom a row belongs to, for the ``Natural`` partition.
        test_path: A file or folder of test rows with the same columns. Default: test rows are held out of ``path``.
        test_fraction: The part that is held out, of each owner and each class, the same for every run; not with ``test_path``.
        scale: ``minmax`` brings each feature to [0.1, 0.9] over the training rows, and cuts what lies further out in test rows
            at 0 and 1. ``standard`` brings it to mean 0 and deviation 1. ``none`` leaves it. Test rows have no say in it;
            rows that a client holds out for validation have.
        **kwargs: Those of ``FederatedDataModule``; those of images have no effect.
    """

    def __init__(
        self,
        path: str,
        label: str,
        features: list[str] | None = None,
        client: str | None = None,
        test_path: str | None = None,
        test_fraction: float = 0.2,
        scale: ScaleName = "minmax",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _check_arguments(label, features, test_fraction, scale)
        self.path = path
        self.label = label
        self.features = features
        self.client = client
        self.test_path = test_path
        self.test_fraction = test_fraction
        self.scale: ScaleName = scale

    def load(self) -> PublishedSplits:
        test = None if self.test_path is None else self._found(self.test_path)
        return read_table(
            self._found(self.path),
            self.label,
            self.features,
            self.client,
            test,
            self.test_fraction,
            self.scale,
        )

    def _found(self, given: str) -> Path:
        """A file beside the user comes before one in the folder that holds the published sets, unless ``root`` is given."""
        path = Path(given).expanduser()
        return path if self.root is None and path.exists() else self.data_root(".") / path


def _check_arguments(
    label: str, features: Sequence[str] | None, test_fraction: float, scale: str
) -> None:
    if not 0 < test_fraction < 1:
        raise FlsuiteError(f"data.test_fraction must lie between 0 and 1, got {test_fraction}")
    if scale not in get_args(ScaleName):
        raise FlsuiteError(
            f"data.scale must be one of {', '.join(get_args(ScaleName))}, got {scale!r}"
        )
    if features is not None and (not features or len({*features}) < len(features)):
        raise FlsuiteError("data.features must name at least one column, and none twice")
    if label in (features or ()):
        raise FlsuiteError(f"data.features must not have the label {label!r} in it")
