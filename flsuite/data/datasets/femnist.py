"""FEMNIST: handwritten characters by writer, as in the LEAF benchmark.

Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097.
"""

import json
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, refused_as
from flsuite.common.random import numpy_generator
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits
from flsuite.data.module import FederatedDataModule

_SIDE = 28
_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_REMEDY = (
    "make it with LEAF's data/femnist/preprocess.sh and put its data/train and data/test, or "
    "data/all_data, there, or a femnist.npz with X, y and writers"
)

_Samples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Images uint8 ``(n, 28, 28, 1)``, labels int64 ``(n,)``, writers ``(n,)`` by name or number."""


def _find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of the training split, and of the test split if there is one."""
    arrays = folder / "femnist.npz"
    if arrays.is_file():
        return [arrays], []

    bases = (folder, folder / "data")
    for base in bases:
        if train := sorted((base / "train").glob("*.json")):
            return train, sorted((base / "test").glob("*.json"))
    for base in bases:
        for place in (base, base / "all_data"):
            if files := sorted(place.glob("all_data*.json")):
                return files, []
    return [], []


def _read_file(file: Path) -> list[_Samples]:
    """Return the samples of a file, in parts.

    Raises:
        FlsuiteError: If the file is damaged.
    """
    with refused_as(f"{file} is damaged or not FEMNIST", f"delete it and {_REMEDY}"):
        samples = [_read_arrays(file)] if file.suffix == ".npz" else list(_read_leaf(file))
        if not samples:
            raise ValueError("it has no writers")
    return samples


def _read_arrays(file: Path) -> _Samples:
    # A pickle in the file could run code.
    with np.load(file, allow_pickle=False) as arrays:
        images, labels = _checked(arrays["X"], arrays["y"])
        writers = arrays["writers"]
    if writers.shape != labels.shape:
        raise ValueError(f"writers have shape {writers.shape} for {len(labels)} samples")
    return images, labels, writers.astype(str if writers.dtype.kind in "US" else np.int64)


def _read_leaf(file: Path) -> Iterator[_Samples]:
    """Read a file of LEAF, one writer at a time.

    Each writer's floats are dropped after conversion, because Python objects take ten times the
    memory.
    """
    with file.open(encoding="utf-8") as stream:
        content = json.load(stream)
    for user, samples in zip(content["users"], content["num_samples"], strict=True):
        data = content["user_data"].pop(user)
        images, labels = _checked(np.asarray(data["x"], np.float32), np.asarray(data["y"]))
        if len(labels) != samples:
            raise ValueError(f"writer {user} has {len(labels)} samples, but num_samples {samples}")
        yield images, labels, np.full(len(labels), str(user))


def _checked(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 ``(n, 28, 28, 1)`` and labels int64 ``(n,)``."""
    if y.ndim != 1 or not len(y) or len(x) != len(y) or x.size != len(y) * _SIDE * _SIDE:
        raise ValueError(f"images have shape {x.shape} and labels {y.shape}")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(_CLASSES):
        raise ValueError(f"labels are not whole numbers from 0 to {len(_CLASSES) - 1}")
    if x.dtype != np.uint8:
        if not (x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1):
            raise ValueError("pixels are neither bytes nor numbers in [0, 1]")
        x = np.rint(x * 255).astype(np.uint8)
    return x.reshape(-1, _SIDE, _SIDE, 1), y.astype(np.int64)


_TEST_FRACTION = 0.1
_SPLIT_SEED = 0


def _joined(samples: list[_Samples]) -> DataSplit:
    """Return all samples as one split, with consistent writer numbers."""
    images, labels, writers = (np.concatenate(column) for column in zip(*samples, strict=True))
    ids = np.unique(writers, return_inverse=True)[1].astype(np.int64)
    return DataSplit(torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(ids))


def _held_out(whole: DataSplit) -> Tensor:
    """Return the rows of the test split, ascending."""
    assert whole.ids is not None
    ids = whole.ids.numpy()
    rows_of = np.split(np.argsort(ids, kind="stable"), np.cumsum(np.bincount(ids))[:-1])
    held = []
    for writer, rows in enumerate(rows_of):
        order = numpy_generator(_SPLIT_SEED, "femnist/test", client=writer).permutation(rows)
        # Rounded half up, so a writer with five samples has one for testing.
        held.append(order[: int(_TEST_FRACTION * len(rows) + 0.5)])
    return torch.from_numpy(np.sort(np.concatenate(held)))


class FEMNIST(FederatedDataModule):
    """Handwritten digits and letters of some 3550 writers, 28x28 gray, 62 classes.

    With the ``Natural`` partition, clients are writers or groups of whole writers. LEAF publishes a
    script instead of files, so nothing is downloaded. The files are in ``root/femnist`` or, if
    there is no such folder, in ``root`` itself. The default of ``root`` is ``~/.cache/flsuite``.
    The first of these is read:

    1. ``femnist.npz``: ``X``, uint8 or floats in [0, 1], ``(n, 784)`` or ``(n, 28, 28[, 1])``, and
       ``y`` and ``writers``, ``(n,)``.
    2. LEAF's ``train/*.json`` and ``test/*.json``, also under ``data/``. Without ``test``, as in 3.
    3. LEAF's ``all_data_*.json``, also under ``all_data/`` or ``data/all_data/``.

    Without a test split, a tenth of each writer's samples (LEAF's own default) is held out
    with a fixed seed. A writer with fewer than five samples has no test samples.
    """

    def load(self) -> PublishedSplits:
        """Read the files.

        Classes are digits, capitals and small letters. The ids are the writers, numbered in the
        order of their names. The background is 255, white, as in LEAF.
        """
        folder = self.data_root()
        folder = folder / "femnist" if (folder / "femnist").is_dir() else folder
        train, test = _find_files(folder)
        if not train:
            raise FlsuiteError(
                f"FEMNIST is not in {folder}; {_REMEDY}, or set data.root or FLSUITE_DATA_ROOT"
            )

        parts = [part for file in train for part in _read_file(file)]
        train_samples = sum(len(labels) for _, labels, _ in parts)
        parts += [part for file in test for part in _read_file(file)]
        whole = _joined(parts)
        held = torch.arange(train_samples, len(whole)) if test else _held_out(whole)
        if not len(held):
            raise FlsuiteError(
                f"no writer in {folder} has the five samples that a test split needs; "
                f"add samples or {_REMEDY}"
            )

        kept = torch.ones(len(whole), dtype=torch.bool)
        kept[held] = False
        spec = DataSpec((1, _SIDE, _SIDE), len(_CLASSES), class_names=_CLASSES)
        return PublishedSplits(spec, whole.take(kept), whole.take(held))
