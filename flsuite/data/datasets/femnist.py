"""FEMNIST: handwritten characters by their writers, as in the LEAF benchmark.

Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flsuite.data.datasets.femnist_files import (
    CLASSES,
    REMEDY,
    SIDE,
    Samples,
    find_files,
    read_samples,
)
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.random import numpy_generator

__all__ = ["FEMNIST", "read_femnist"]

DEFAULT_ROOT = "~/.cache/flsuite"
TEST_FRACTION = 0.1
SPLIT_SEED = 0


def read_femnist(folder: Path) -> PublishedSplits:
    """Read the first of these that is in ``folder``.

    1. ``femnist.npz``: ``X``, uint8 or floats in [0, 1], ``(n, 784)`` or ``(n, 28, 28[, 1])``, and
       ``y`` and ``writers``, ``(n,)``.
    2. LEAF's ``train/*.json`` and ``test/*.json``, also under ``data/``. Without ``test``, as in 3.
    3. LEAF's ``all_data_*.json``, also under ``all_data/`` or ``data/all_data/``.

    Where there is no test split, a tenth of each writer's samples (LEAF's own default) is held out
    with a fixed seed. A writer with fewer than five samples has no test samples.

    Returns:
        ``train`` and ``test`` with images uint8 ``(n, 28, 28, 1)``, labels int64 ``(n,)`` in the
        order of the class names (digits, capitals, small letters), and the writers as ids, numbered
        in the order of their names. There is no ``val``. The background is 255, white, as in LEAF.

    Raises:
        FlsuiteError: If there is none of these, or a file is damaged.
    """
    folder = folder.expanduser()
    train, test = find_files(folder)
    if not train:
        raise FlsuiteError(f"FEMNIST is not in {folder}; {REMEDY}, or set data.root")

    parts = [read_samples(files) for files in (train, test) if files]
    whole = _joined(parts)
    # The samples of the test files, if there are any, come second.
    held = torch.arange(len(parts[0][1]), len(whole)) if test else _held_out(whole)
    if not len(held):
        raise FlsuiteError(
            f"no writer in {folder} has the five samples that a test split needs; "
            f"add samples or {REMEDY}"
        )

    kept = torch.ones(len(whole), dtype=torch.bool)
    kept[held] = False
    spec = DataSpec((1, SIDE, SIDE), len(CLASSES), class_names=CLASSES)
    return PublishedSplits(spec, whole.take(kept.nonzero().squeeze(1)), whole.take(held))


def _joined(parts: list[Samples]) -> DataSplit:
    """Return all samples as one split, the writers numbered over all parts."""
    images, labels, writers = (np.concatenate(column) for column in zip(*parts, strict=True))
    ids = np.unique(writers, return_inverse=True)[1].astype(np.int64)
    return DataSplit(torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(ids))


def _held_out(whole: DataSplit) -> Tensor:
    """Return the rows of the test split, ascending."""
    assert whole.ids is not None
    ids = whole.ids.numpy()
    rows_of = np.split(np.argsort(ids, kind="stable"), np.cumsum(np.bincount(ids))[:-1])
    held = []
    for writer, rows in enumerate(rows_of):
        order = numpy_generator(SPLIT_SEED, "femnist/test", client=writer).permutation(rows)
        # Rounded half up, so that a writer with five samples has one for testing.
        held.append(order[: int(TEST_FRACTION * len(rows) + 0.5)])
    return torch.from_numpy(np.sort(np.concatenate(held)))


class FEMNIST(FederatedDataModule):
    """Handwritten digits and letters of some 3550 writers, 28x28 in grey, 62 classes.

    With the ``Natural`` partition, clients are writers or groups of whole writers. LEAF publishes a
    script instead of files, so nothing is downloaded. :func:`read_femnist` lists the files that are
    read. They are in ``root/femnist`` or, where there is no such folder, in ``root`` itself. The
    default of ``root`` is ``~/.cache/flsuite``.

    Args:
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    def load(self) -> PublishedSplits:
        root = self.data_root(DEFAULT_ROOT)
        return read_femnist(root / "femnist" if (root / "femnist").is_dir() else root)
