"""FEMNIST: handwritten characters by their writers, as the LEAF benchmark deals them.

Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097.
"""

import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator

__all__ = ["FEMNIST", "read_femnist"]

DEFAULT_ROOT = "~/.cache/flsuite"
SIDE = 28
CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
TEST_FRACTION = 0.1
SPLIT_SEED = 0
REMEDY = (
    "make it with LEAF's data/femnist/preprocess.sh and put its data/train and data/test, or data/all_data, there, "
    "or a femnist.npz with X, y and writers"
)

Samples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Images uint8 ``(n, 28, 28, 1)``, labels int64 ``(n,)`` and writers ``(n,)``, by name or number."""


def read_femnist(folder: Path) -> PublishedSplits:
    """Read the set from what is found first in ``folder``.

    1. ``femnist.npz``: ``X``, uint8 or floats in [0, 1], ``(n, 784)`` or ``(n, 28, 28[, 1])``; ``y`` and ``writers`` ``(n,)``.
    2. LEAF's ``train/*.json`` and ``test/*.json``, also under ``data/``. With no ``test``, as in 3.
    3. LEAF's ``all_data_*.json``, also under ``all_data/`` or ``data/all_data/``.

    Where there is no test split, a tenth of each writer's samples (LEAF's own default), drawn once for all with a seed that
    is no parameter, is held out; a writer with fewer than five has none.

    Returns:
        ``train`` and ``test`` with images uint8 ``(n, 28, 28, 1)``, 255 for the white background as LEAF has it, labels
        int64 ``(n,)`` in the order of the class names (digits, capitals, small letters), and the writers as ids, numbered
        in the order of their names; no ``val``.

    Raises:
        FlsuiteError: If there is none of it, or a file is damaged.
    """
    folder = folder.expanduser()
    spec = DataSpec((1, SIDE, SIDE), len(CLASSES), class_names=CLASSES)
    train, test = _find(folder)
    if not train:
        raise FlsuiteError(f"FEMNIST is not in {folder}; {REMEDY}, or set data.root")
    parts = [_read(files) for files in (train, test) if files]
    whole = _together(parts)
    held = torch.arange(len(parts[0][1]), len(whole)) if test else _hold_out(whole)
    if not len(held):
        raise FlsuiteError(
            f"no writer in {folder} has the five samples that a test split takes; add samples or {REMEDY}"
        )
    kept = torch.ones(len(whole), dtype=torch.bool)
    kept[held] = False
    return PublishedSplits(spec, whole.take(kept.nonzero().squeeze(1)), whole.take(held))


def _find(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of the training split, and those of the test split if there is one."""
    if (arrays := folder / "femnist.npz").is_file():
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


def _read(files: Sequence[Path]) -> Samples:
    columns = zip(*(part for file in files for part in _samples(file)), strict=True)
    images, labels, writers = (np.concatenate(column) for column in columns)
    return images, labels, writers


def _samples(file: Path) -> list[Samples]:
    try:
        found = [_arrays(file)] if file.suffix == ".npz" else list(_leaf(file))
        if not found:
            raise ValueError("it holds no writers")
        return found
    except (
        Exception
    ) as error:  # zipfile, zlib, numpy and json raise a dozen types on a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FlsuiteError(
            f"{file} is damaged or not FEMNIST ({reason}); delete it and {REMEDY}"
        ) from error


def _arrays(file: Path) -> Samples:
    with np.load(file, allow_pickle=False) as arrays:
        images, labels = _checked(arrays["X"], arrays["y"])
        writers = arrays["writers"]
    if writers.shape != labels.shape:
        raise ValueError(f"writers have shape {writers.shape} for {len(labels)} samples")
    return (
        images,
        labels,
        writers.astype(str) if writers.dtype.kind in "US" else writers.astype(np.int64),
    )


def _leaf(file: Path) -> Iterator[Samples]:
    """One file of LEAF, a writer at a time: as JSON the floats take ten times the room that they need."""
    with file.open() as stream:
        content = json.load(stream)
    for user, samples in zip(content["users"], content["num_samples"], strict=True):
        data = content["user_data"].pop(user)
        images, labels = _checked(np.asarray(data["x"], np.float32), np.asarray(data["y"]))
        if len(labels) != samples:
            raise ValueError(
                f"writer {user} has {len(labels)} samples where {samples} are announced"
            )
        yield images, labels, np.full(len(labels), str(user))


def _checked(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 ``(n, 28, 28, 1)`` and labels int64 ``(n,)``."""
    if y.ndim != 1 or not len(y) or len(x) != len(y) or x.size != len(y) * SIDE * SIDE:
        raise ValueError(f"images have shape {x.shape} and labels {y.shape}")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(CLASSES):
        raise ValueError(f"labels are not whole numbers from 0 to {len(CLASSES) - 1}")
    if x.dtype != np.uint8:
        if not (x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1):
            raise ValueError("pixels are neither bytes nor numbers in [0, 1]")
        x = np.rint(x * 255).astype(np.uint8)
    return x.reshape(-1, SIDE, SIDE, 1), y.astype(np.int64)


def _together(parts: list[Samples]) -> DataSplit:
    """All samples, the writers numbered over all parts."""
    images, labels, writers = (np.concatenate(column) for column in zip(*parts, strict=True))
    _, ids = np.unique(writers, return_inverse=True)
    return DataSplit(
        torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(ids.astype(np.int64))
    )


def _hold_out(whole: DataSplit) -> torch.Tensor:
    """The rows of the test split, ascending."""
    assert whole.ids is not None
    ids = whole.ids.numpy()
    owned = np.split(np.argsort(ids, kind="stable"), np.cumsum(np.bincount(ids))[:-1])
    held = []
    for writer, rows in enumerate(owned):
        order = numpy_generator(SPLIT_SEED, "femnist/test", client=writer).permutation(rows)
        held.append(order[: int(TEST_FRACTION * len(rows) + 0.5)])
    return torch.from_numpy(np.sort(np.concatenate(held)))


class FEMNIST(FederatedDataModule):
    """Handwritten digits and letters of some 3550 writers, 28x28 in grey, white background, 62 classes.

    Pair it with the ``Natural`` partition for clients that are writers, or groups of whole writers. LEAF publishes a
    script, not files, so nothing is downloaded: see :func:`read_femnist` for what is looked for, in ``root/femnist`` or,
    where there is no such folder, in ``root`` itself; by default ``~/.cache/flsuite``.

    Args:
        **kwargs: Those of ``FederatedDataModule``.
    """

    def load(self) -> PublishedSplits:
        root = self.data_root(DEFAULT_ROOT)
        return read_femnist(root / "femnist" if (root / "femnist").is_dir() else root)
