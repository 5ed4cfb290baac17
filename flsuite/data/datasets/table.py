"""Tables, and the files that they are read from."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from flsuite.common.arguments import Range, SmallProbability, check_init
from flsuite.common.errors import FlsuiteError, likeliest, refused_as, require_extra, some
from flsuite.common.random import numpy_generator
from flsuite.data.datasets.csv_files import (
    ScaleName,
    csv_frames,
    digest_of_files,
    fit_scale,
    has_numbers,
    is_number,
    missing_values,
    numeric_chunks,
)
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits
from flsuite.data.module import FederatedDataModule
from flsuite.data.splits import evenly_held_out

if TYPE_CHECKING:
    import pandas as pd


_SUFFIXES = (".csv", ".parquet")
_MOST_NAMED = 8

Frames = list["tuple[Path, pd.DataFrame]"]
"""Files and their content, ordered by file name."""


def _files(path: Path) -> list[Path]:
    """Return a file, or all tables of a folder, ordered by name.

    Raises:
        FlsuiteError: If there is none.
    """
    if not path.exists():
        raise FlsuiteError(
            f"there is no file or folder {path}; set data.path, which is relative to data.root "
            "or FLSUITE_DATA_ROOT"
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

    return files


def _read_frames(path: Path) -> Frames:
    """Read a file, or all files of a folder.

    Raises:
        FlsuiteError: If there is no such file, or one is damaged or empty.
    """
    return [(file, _read_frame(file)) for file in _files(path)]


def _read_frame(file: Path) -> "pd.DataFrame":
    if file.suffix.lower() == ".parquet":
        return _read_parquet(file)
    (frame,) = csv_frames(file)
    return frame


def _read_parquet(file: Path) -> "pd.DataFrame":
    import pandas as pd

    require_extra(f"reading {file}, unless it is saved as CSV,", ("pyarrow",), "parquet")
    with refused_as(f"{file} cannot be read as Parquet", "fix or remove it"):
        # Drop the index, where pandas may have stored row names. It is not a column.
        frame = pd.read_parquet(file, engine="pyarrow").reset_index(drop=True)
    if frame.empty:
        raise FlsuiteError(f"{file} has no rows; put the data there or remove it")
    return frame.set_axis([str(name) for name in frame.columns], axis=1)


def _feature_columns(
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
    return some([*map(repr, names)], _MOST_NAMED)


def _take_columns(
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


_SPLIT_SEED = 0

_Columns = Annotated[
    list[str],
    Range(
        "at least one column, and none twice",
        lambda names: len({*names}) == len(names) > 0,
    ),
]


def _held_out(y: np.ndarray, owners: np.ndarray | None, fraction: float) -> np.ndarray:
    """Return which rows are test rows, bool ``(n,)``.

    The fraction is the same for each owner and class, up to rounding: the rows are sorted by owner
    and class, at random within, and each ``1 / fraction``-th is held out. A class that would lose
    all its training rows is not held out.
    """
    draws = numpy_generator(_SPLIT_SEED, "table/test").random(len(y))
    # The last key of lexsort is the primary one.
    order = np.lexsort((draws, y) if owners is None else (draws, y, owners))
    held = np.zeros(len(y), dtype=bool)
    held[order] = evenly_held_out(len(y), fraction)
    return held & np.isin(y, y[~held])


def _check_classes(y: np.ndarray, held: np.ndarray, names: np.ndarray, test_path: Path) -> None:
    """Refuse test rows of a class without training rows."""
    unknown = np.setdiff1d(y[held], y[~held])
    if len(unknown):
        raise FlsuiteError(
            f"{test_path} has rows of class {names[unknown[0]]}, but the training rows have none; "
            "remove them, or add such rows to data.path"
        )


class Table(FederatedDataModule):
    """A CSV or Parquet file, or a folder of such files, with a column of labels.

    Labels that are words become classes in alphabetical order, numbers in numerical order. A
    missing or unusable value is an error that names it: no value is imputed, and no row is dropped.

    Args:
        path: The file, ``.csv`` with commas and a header or ``.parquet``
            (``pip install flsuite[parquet]``), or a folder whose files are read as one table. A
            relative path is relative to ``root``. Without ``root``, it is searched in the working
            directory, then in ``$FLSUITE_DATA_ROOT``.
        label: The label column, with words or integers.
        features: The columns to learn from. Default: all numeric columns except ``label`` and
            ``client``. Text columns are ignored.
        client: The column of owners, for the ``Natural`` partition.
        test_path: A file or folder of test rows with the same columns. Default: test rows are held
            out of ``path``.
        test_fraction: The fraction of each owner's and each class's rows to hold out for testing,
            the same rows in every run. It has no effect with ``test_path``.
        scale: ``minmax`` scales each feature to [0.1, 0.9] over the training rows, and clips test
            rows to [0, 1]. ``standard`` scales it to mean 0 and standard deviation 1. ``none``
            changes nothing. The scale is fitted on all training rows, including those held out by
            clients for validation, and never on test rows.
        **kwargs: Arguments of ``FederatedDataModule``. Arguments about images have no effect.
    """

    def __init__(
        self,
        path: str | Path,
        label: str,
        features: _Columns | None = None,
        client: str | None = None,
        test_path: str | Path | None = None,
        test_fraction: SmallProbability = 0.2,
        scale: ScaleName = "minmax",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.label = label
        self.features = features
        self.client = client
        self.test_path = test_path
        self.test_fraction = test_fraction
        self.scale: ScaleName = scale
        check_init(self, Table)
        if label in (features or ()):
            raise FlsuiteError(f"Table: features must not include the label {label!r}")

    @property
    def content_digests(self) -> dict[str, str]:
        """Digests of the files as they are now, by the argument that names them."""
        return {
            name: digest_of_files(_files(self._place(given)))
            for name, given in (("path", self.path), ("test_path", self.test_path))
            if given is not None
        }

    def load(self) -> PublishedSplits:
        """Read the table, with the owners as ids, numbered in the order of their names.

        Raises:
            FlsuiteError: If a file, a column or a value is missing, a feature is infinite or not a
                number, files differ in their columns, there is only one class, or the test rows
                have a class without training rows.
        """
        path = self._place(self.path)
        test_path = None if self.test_path is None else self._place(self.test_path)
        train_frames = _read_frames(path)
        frames = train_frames if test_path is None else [*train_frames, *_read_frames(test_path)]
        columns = _feature_columns(frames, self.label, self.features, self.client)
        x, labels, clients = _take_columns(frames, columns, self.label, self.client)

        # Over training and test rows, so both number the classes identically.
        names, y = np.unique(labels, return_inverse=True)
        if len(names) < 2:
            raise FlsuiteError(
                f"column {self.label!r} of {path} has the same label in all rows, {names[0]}; "
                "name another data.label"
            )
        owners = None if clients is None else np.unique(clients, return_inverse=True)[1]
        if test_path is None:
            held = _held_out(y, owners, self.test_fraction)
            if not held.any():
                raise FlsuiteError(
                    f"no row of {path} can be held out for testing: it has {len(y)} rows; "
                    "raise data.test_fraction"
                )
        else:
            held = np.arange(len(y)) >= sum(len(frame) for _, frame in train_frames)
            _check_classes(y, held, names, test_path)

        spec = DataSpec((len(columns),), len(names), class_names=tuple(map(str, names)))
        # In float64, because float32 cannot distinguish large numbers that are close together.
        fitted = fit_scale(self.scale, x[~held])
        train, test = (
            DataSplit(
                torch.from_numpy(fitted(x[part]).astype(np.float32)),
                torch.from_numpy(y[part].astype(np.int64)),
                None if owners is None else torch.from_numpy(owners[part].astype(np.int64)),
            )
            for part in (~held, held)
        )
        return PublishedSplits(spec, train, test)

    def _place(self, given: str | Path) -> Path:
        """Return the path of a file. Without ``root``, the working directory comes first."""
        path = Path(given).expanduser()
        return path if self.root is None and path.exists() else self.data_root(".") / path
