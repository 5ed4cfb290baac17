"""The files of FEMNIST: LEAF's JSON, or arrays in one ``.npz``."""

import json
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flsuite.errors import FlsuiteError, one_line

__all__ = ["CLASSES", "REMEDY", "SIDE", "Samples", "find_files", "read_samples"]

SIDE = 28
CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
REMEDY = (
    "make it with LEAF's data/femnist/preprocess.sh and put its data/train and data/test, or "
    "data/all_data, there, or a femnist.npz with X, y and writers"
)

Samples = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Images uint8 ``(n, 28, 28, 1)``, labels int64 ``(n,)``, writers ``(n,)`` by name or number."""


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of the training split, and those of the test split if there is one."""
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


def read_samples(files: Sequence[Path]) -> Samples:
    """Read the samples of all files.

    Raises:
        FlsuiteError: If a file is damaged.
    """
    columns = zip(*(part for file in files for part in _read_file(file)), strict=True)
    images, labels, writers = (np.concatenate(column) for column in columns)
    return images, labels, writers


def _read_file(file: Path) -> list[Samples]:
    try:
        parts = [_read_arrays(file)] if file.suffix == ".npz" else list(_read_leaf(file))
        if not parts:
            raise ValueError("it has no writers")
        return parts
    except Exception as error:  # zipfile, zlib, numpy and json raise many types on a damaged file
        raise FlsuiteError(
            f"{file} is damaged or not FEMNIST ({one_line(error)}); delete it and {REMEDY}"
        ) from error


def _read_arrays(file: Path) -> Samples:
    # A pickle in the file could run code.
    with np.load(file, allow_pickle=False) as arrays:
        images, labels = _checked(arrays["X"], arrays["y"])
        writers = arrays["writers"]
    if writers.shape != labels.shape:
        raise ValueError(f"writers have shape {writers.shape} for {len(labels)} samples")
    return images, labels, writers.astype(str if writers.dtype.kind in "US" else np.int64)


def _read_leaf(file: Path) -> Iterator[Samples]:
    """Read a file of LEAF, one writer at a time.

    Each writer's floats are dropped once they are converted, because Python objects take ten times
    the memory.
    """
    with file.open() as stream:
        content = json.load(stream)
    for user, samples in zip(content["users"], content["num_samples"], strict=True):
        data = content["user_data"].pop(user)
        images, labels = _checked(np.asarray(data["x"], np.float32), np.asarray(data["y"]))
        if len(labels) != samples:
            raise ValueError(f"writer {user} has {len(labels)} samples, but num_samples {samples}")
        yield images, labels, np.full(len(labels), str(user))


def _checked(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 ``(n, 28, 28, 1)`` and labels int64 ``(n,)``."""
    if y.ndim != 1 or not len(y) or len(x) != len(y) or x.size != len(y) * SIDE * SIDE:
        raise ValueError(f"images have shape {x.shape} and labels {y.shape}")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(CLASSES):
        raise ValueError(f"labels are not whole numbers from 0 to {len(CLASSES) - 1}")
    if x.dtype != np.uint8:
        if not (x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1):
            raise ValueError("pixels are neither bytes nor numbers in [0, 1]")
        x = np.rint(x * 255).astype(np.uint8)
    return x.reshape(-1, SIDE, SIDE, 1), y.astype(np.int64)
