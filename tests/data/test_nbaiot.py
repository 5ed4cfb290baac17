"""Tests of N-BaIoT on tiny files in both layouts: chunks, cap, split, scaling, defects."""

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch

from flsuite.common.errors import FlsuiteError
from flsuite.data import Natural, NBaIoT, PublishedSplits
from flsuite.data.datasets import nbaiot
from flsuite.data.datasets.nbaiot import DEVICES, GAFGYT, TRAFFIC, WITHOUT_MIRAI

FILES = {1: 20, 3: 12}
HEADER = [f"MI_dir_L{number}_weight" for number in range(115)]


def content(device: int, traffic: str, rows: int) -> np.ndarray:
    """Return rows in which each kind of traffic has ten high columns.

    The last columns are the device, the row's number, and a constant.
    """
    kind = TRAFFIC.index(traffic)
    x = np.random.default_rng([device, kind]).normal(0, 1, (rows, 115))
    x[:, kind:110:11] += 8
    x[:, 112] = device
    x[:, 113] = np.arange(rows)
    x[:, 114] = 0
    return x


def kinds(device: int) -> tuple[str, ...]:
    return ("benign", *GAFGYT) if device in WITHOUT_MIRAI else TRAFFIC


def flat(device: int, traffic: str) -> str:
    return f"{device}.{traffic}.csv"


def nested(device: int, traffic: str) -> str:
    family, _, attack = traffic.partition(".")
    return f"{DEVICES[device - 1]}/" + (
        f"{family}_attacks/{attack}.csv" if attack else "benign_traffic.csv"
    )


def write(folder: Path, devices: Mapping[int, int], name: Callable[[int, str], str] = flat) -> Path:
    """Write files for these devices, with a number of rows per file."""
    for device, rows in devices.items():
        for traffic in kinds(device):
            file = folder / name(device, traffic)
            file.parent.mkdir(parents=True, exist_ok=True)
            pd.DataFrame(content(device, traffic, rows), columns=HEADER).to_csv(file, index=False)
    return folder


def copy(folder: Path, there: Path, *devices: int) -> Path:
    """Copy the files of these devices, for a test that changes one."""
    for device in devices:
        for file in folder.glob(f"{device}.*"):
            shutil.copy(file, there)
    return there


def change(file: Path, row: int, column: int, value: str) -> None:
    """Change one cell of a file; row 0 is the header."""
    lines = [line.split(",") for line in file.read_text().splitlines()]
    lines[row][column] = value
    file.write_text("\n".join(map(",".join, lines)) + "\n")


def equal(a: PublishedSplits, b: PublishedSplits) -> bool:
    return all(
        torch.equal(x.x, y.x) and torch.equal(x.y, y.y) and torch.equal(x.ids, y.ids)
        for x, y in ((a.train, b.train), (a.test, b.test))
        if x.ids is not None and y.ids is not None
    )


def read_nbaiot(
    folder: Path, classes: Any = "binary", chunk_rows: int = nbaiot.CHUNK_ROWS, **kwargs: Any
) -> PublishedSplits:
    with patch.object(nbaiot, "CHUNK_ROWS", chunk_rows):
        return NBaIoT(classes, root=folder, **kwargs).load()


unchanged = cache(read_nbaiot)  # of a folder that no test changes


@cache
def unscaled(folder: Path, rows_per_file: int | None = None) -> PublishedSplits:
    with patch.object(nbaiot, "fit_scale", lambda _, train: lambda x: x):
        return read_nbaiot(folder, "attack", device=3, rows_per_file=rows_per_file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files for two devices, one of them without Mirai."""
    return write(tmp_path_factory.mktemp("nbaiot"), FILES)


# Reading


def test_reading(folder: Path) -> None:
    source = unchanged(folder, "attack")
    assert source.spec.shape == (115,) and source.spec.class_names == TRAFFIC and source.val is None
    assert source.train.x.dtype == torch.float32 and source.train.y.dtype == torch.int64
    assert source.train.ids is not None and source.test.ids is not None
    assert source.test.y.bincount().tolist() == [6] * 6 + [4] * 5
    assert source.train.y.bincount().tolist() == [16 + 10] * 6 + [16] * 5
    assert source.train.ids.bincount().tolist() == [0, 11 * 16, 0, 6 * 10]
    assert source.test.ids.bincount().tolist() == [0, 11 * 4, 0, 6 * 2]
    own = source.train.x[torch.arange(len(source.train)), source.train.y]
    assert own.min() > 0.4  # the column that tells the class is high


def test_both_layouts_are_the_same(folder: Path, tmp_path: Path) -> None:
    assert equal(unchanged(folder, "attack"), read_nbaiot(write(tmp_path, FILES, nested), "attack"))


def test_families_and_one_device(folder: Path) -> None:
    """A single device has its rows of the whole set, no owners, and all classes."""
    source, whole = unchanged(folder, "family", device=3), unchanged(folder, "attack")
    assert source.spec.class_names == ("benign", "gafgyt", "mirai")
    assert source.train.y.bincount().tolist() == [10, 5 * 10]
    assert source.train.ids is None and source.test.ids is None
    assert whole.test.ids is not None
    expected = whole.test.y[whole.test.ids == 3]
    assert torch.equal(source.test.y, (expected > 0).long()) and len(expected) == 12


# Chunks, cap, split


def test_the_cap(folder: Path) -> None:
    """A smaller cap gives a subset of a larger one in both splits, not the head of the file."""

    def rows(cap: int | None) -> list[set[int]]:
        """Return the numbers of the training and test rows of the first file."""
        source = unscaled(folder, cap)
        parts = (source.train, source.test)
        return [{*part.x[part.y == 0][:, 113].int().tolist()} for part in parts]

    all_train, all_test = rows(None)
    assert all_train | all_test == {*range(12)} and len(all_test) == 2
    train, test = rows(5)
    assert (len(train), len(test)) == (4, 1) and train < all_train and test < all_test
    assert train | test != {*range(5)} and rows(1000) == [all_train, all_test]


def test_chunks_make_no_difference_with_a_cap(folder: Path) -> None:
    whole, chunks = (
        read_nbaiot(folder, device=3, rows_per_file=7, chunk_rows=rows) for rows in (1000, 5)
    )
    assert len(whole.train) + len(whole.test) == 6 * 7
    assert torch.equal(chunks.train.x, whole.train.x) and torch.equal(chunks.test.x, whole.test.x)


# Scaling


def test_scaling_is_that_of_the_training_rows_in_chunks_of_any_size(folder: Path) -> None:
    """The oracle is the formula in float64, on the unscaled rows."""
    scaled, raw = read_nbaiot(folder, "family", 9, device=3), unscaled(folder)
    low, high = raw.train.x.double().amin(0), raw.train.x.double().amax(0)
    for name in ("train", "test"):
        part, plain = getattr(scaled, name).x, getattr(raw, name).x[:, :112].double()
        expected = 0.1 + 0.8 * (plain - low[:112]) / (high - low)[:112]
        assert torch.allclose(part[:, :112].double(), expected.clamp(0, 1), atol=1e-6)
        assert (part[:, [112, 114]] == 0.5).all()
        assert torch.equal(part, getattr(unchanged(folder, "family", device=3), name).x)


# Defects

SCAN = r"3\.gafgyt\.scan\.csv"
CELL = SCAN + ": row 9, column 'MI_dir_L4_weight': "


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (9, "", CELL + r".*missing .in 1 row"),
        (9, "x", CELL + r"expected a number, got 'x';"),
        (9, "inf", CELL + r"expected a finite float32 number, got inf;"),
        (0, "a", r"scan\.csv: header, column 5: .*got 'a';"),
        (0, "a,b", SCAN + " has 116 columns"),
    ],
)
def test_defects(folder: Path, tmp_path: Path, row: int, value: str, message: str) -> None:
    """Defects are found in rows beyond the cap, too."""
    change(copy(folder, tmp_path, 3) / "3.gafgyt.scan.csv", row, 4, value)
    with pytest.raises(FlsuiteError, match=message) as error:
        read_nbaiot(tmp_path, chunk_rows=8, rows_per_file=5)
    assert "\n" not in str(error.value)


def test_a_file_without_a_header(folder: Path, tmp_path: Path) -> None:
    text = (",".join(map(str, np.arange(115) / 7)) + "\n") * 3
    (copy(folder, tmp_path, 3) / "3.benign.csv").write_text(text)
    with pytest.raises(FlsuiteError, match=r"more than one|3\.benign\.csv has no header"):
        read_nbaiot(tmp_path)


def test_too_few_for_a_test_split(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="the 5 rows that a test split needs"):
        read_nbaiot(write(tmp_path, {3: 4}))


def test_files_that_are_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"not in .*1\.gafgyt\.combo\.csv"):
        NBaIoT(root=str(tmp_path)).setup()
    with pytest.raises(FlsuiteError, match=r"N-BaIoT's device 2 is not in"):
        NBaIoT(root=str(folder), device=2).setup()
    (copy(folder, tmp_path, 1) / "1.mirai.udpplain.csv").unlink()
    with pytest.raises(FlsuiteError, match=r"device 1 lacks .*1\.mirai\.udpplain\.csv"):
        read_nbaiot(tmp_path)


# A federation


def test_clients_are_devices_and_the_test_split_is_the_same_in_every_run(folder: Path) -> None:
    data = NBaIoT("attack", root=str(folder), clients=2, partition=Natural(), seed=7)
    data.setup()
    train, test = data.federated.train, data.federated.test
    assert train.ids is not None
    assert [train.ids[rows].unique().tolist() for rows in train.rows] == [[1], [3]]
    expected = unchanged(folder, "attack")
    assert torch.equal(train.x, expected.train.x) and torch.equal(test.x, expected.test.x)
