"""Any table of numbers with a column of labels, from CSV or Parquet files."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from flsuite.common.arguments import Range, SmallProbability, check_init
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.data.datasets.column_scale import ScaleName, fit_scale
from flsuite.data.datasets.table_files import feature_columns, read_frames, take_columns
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.data.splits import evenly_held_out

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

    def load(self) -> PublishedSplits:
        """Read the table.

        Returns:
            ``train`` and ``test`` with features float32 ``(n, features)``, scaled by the training
            rows, and labels int64 ``(n,)`` in the order of the class names. If ``client`` is given,
            ids are the owners, numbered in the order of their names. There is no ``val``.

        Raises:
            FlsuiteError: If a file, a column or a value is missing, a feature is infinite or not a
                number, files differ in their columns, there is only one class, or the test rows
                have a class without training rows.
        """
        path = self._place(self.path)
        test_path = None if self.test_path is None else self._place(self.test_path)
        train_frames = read_frames(path)
        frames = train_frames if test_path is None else [*train_frames, *read_frames(test_path)]
        columns = feature_columns(frames, self.label, self.features, self.client)
        x, labels, clients = take_columns(frames, columns, self.label, self.client)

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
