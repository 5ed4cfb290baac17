"""Tests of N-BaIoT on tiny files in both layouts: chunks, cap, split, scaling, defects."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch

from flsuite.commands.main import main
from flsuite.data import Dirichlet, Natural, NBaIoT, PublishedSplits
from flsuite.data.datasets import nbaiot
from flsuite.data.datasets.nbaiot import DEVICES, GAFGYT, TRAFFIC, WITHOUT_MIRAI
from flsuite.errors import FlsuiteError
from tests.conftest import classifier, trainer

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


@cache
def unchanged(folder: Path, classes: str) -> PublishedSplits:
    """Read a folder that no test changes."""
    return read_nbaiot(folder, classes)


def read_nbaiot(
    folder: Path, classes: Any = "binary", chunk_rows: int = nbaiot.CHUNK_ROWS, **kwargs: Any
) -> PublishedSplits:
    with patch.object(nbaiot, "CHUNK_ROWS", chunk_rows):
        return NBaIoT(classes, root=folder, **kwargs).load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files for two devices, one of them without Mirai."""
    return write(tmp_path_factory.mktemp("nbaiot"), {1: 20, 3: 12})


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
    assert equal(unchanged(folder, "binary"), read_nbaiot(write(tmp_path, {1: 20, 3: 12}, nested)))


@pytest.mark.parametrize(
    ("classes", "names", "counts"),
    [
        ("binary", ("benign", "attack"), [26, 5 * 26 + 5 * 16]),
        ("family", ("benign", "gafgyt", "mirai"), [26, 5 * 26, 5 * 16]),
    ],
)
def test_classes(folder: Path, classes: Any, names: tuple[str, ...], counts: list[int]) -> None:
    source = unchanged(folder, classes)
    assert source.spec.class_names == names and source.train.y.bincount().tolist() == counts


def test_one_device(folder: Path) -> None:
    """A single device has its rows of the whole set, no owners, and all classes."""
    source, whole = read_nbaiot(folder, "family", device=3), unchanged(folder, "family")
    assert source.train.ids is None and source.test.ids is None and source.spec.num_classes == 3
    assert (len(source.train), len(source.test)) == (60, 12)
    assert whole.test.ids is not None
    assert torch.equal(source.test.y, whole.test.y[whole.test.ids == 3])


# Chunks, cap, split


@pytest.mark.parametrize("cap", [None, 7])
def test_chunks_make_no_difference(tmp_path: Path, cap: int | None) -> None:
    write(tmp_path, {3: 12})
    whole = read_nbaiot(tmp_path, rows_per_file=cap, chunk_rows=1000)
    for rows in (1, 5):
        assert equal(read_nbaiot(tmp_path, rows_per_file=cap, chunk_rows=rows), whole)


def raw_rows(
    folder: Path, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[int], set[int]]:
    """Return the numbers of the training and test rows of the first file."""
    monkeypatch.setattr("flsuite.data.datasets.nbaiot.fit_scale", lambda _, train: lambda x: x)
    source = read_nbaiot(folder, "attack", device=1, rows_per_file=cap)
    train, test = (
        {*part.x[part.y == 0][:, 113].int().tolist()} for part in (source.train, source.test)
    )
    return train, test


def test_the_cap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller cap gives a subset of a larger one in both splits, not the head of the file."""
    all_train, all_test = raw_rows(folder, None, monkeypatch)
    assert all_train | all_test == {*range(20)} and len(all_test) == 4
    train, test = raw_rows(folder, 10, monkeypatch)
    assert (len(train), len(test)) == (8, 2) and train < all_train and test < all_test
    assert train | test != {*range(10)}
    assert raw_rows(folder, 10, monkeypatch) == (train, test)
    assert raw_rows(folder, 1000, monkeypatch) == (all_train, all_test)


def test_the_test_split_does_not_depend_on_the_run(folder: Path) -> None:
    modules = [NBaIoT(root=str(folder), rows_per_file=10, seed=seed, clients=2) for seed in (1, 2)]
    for module in modules:
        module.setup()
    first, second = (module.federated for module in modules)
    assert torch.equal(first.train.x, second.train.x) and torch.equal(first.test.x, second.test.x)


# Scaling


def test_scaling_is_that_of_the_training_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is the formula in float64, on the unscaled rows."""
    scaled = read_nbaiot(folder, chunk_rows=9)
    with monkeypatch.context() as patch:
        patch.setattr("flsuite.data.datasets.nbaiot.fit_scale", lambda _, train: lambda x: x)
        raw = read_nbaiot(folder)
    low, high = raw.train.x.double().amin(0), raw.train.x.double().amax(0)
    for part, unscaled in ((scaled.train, raw.train), (scaled.test, raw.test)):
        expected = 0.1 + 0.8 * (unscaled.x[:, :114].double() - low[:114]) / (high - low)[:114]
        assert torch.allclose(part.x[:, :114].double(), expected.clamp(0, 1), atol=1e-6)
        assert (part.x[:, 114] == 0.5).all()


def test_the_scale_does_not_depend_on_test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outlier in a test row is clipped, and leaves the training rows bit for bit."""
    write(tmp_path, {3: 10})
    with monkeypatch.context() as patch:
        patch.setattr("flsuite.data.datasets.nbaiot.fit_scale", lambda _, train: lambda x: x)
        raw = read_nbaiot(tmp_path, "attack")
    before = read_nbaiot(tmp_path, "attack")
    held = int(raw.test.x[raw.test.y == 0][0, 113])
    change(tmp_path / "3.benign.csv", held + 1, 5, "1e9")
    after = read_nbaiot(tmp_path, "attack")
    assert torch.equal(after.train.x, before.train.x)
    assert after.test.x[:, 5].max() == 1 and before.test.x[:, 5].max() < 1


# Defects

CELL = r"3\.gafgyt\.scan\.csv: row 9, column 'MI_dir_L4_weight': "


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [
        (
            9,
            4,
            "",
            CELL + r".*missing .in 1 row",
        ),
        (
            9,
            4,
            "nan",
            CELL + r".*missing .in 1 row",
        ),
        (
            9,
            4,
            "x",
            CELL + r"expected a number, got 'x';",
        ),
        (
            9,
            4,
            "inf",
            CELL + r"expected a finite float32 number, got inf;",
        ),
        (9, 4, "1,2", r"3\.gafgyt\.scan\.csv cannot be read as CSV"),
        (
            0,
            4,
            "a",
            r"scan\.csv: header, column 5: .*got 'a';",
        ),
        (0, 4, "a,b", r"3\.gafgyt\.scan\.csv has 116 columns"),
        (0, 4, "MI_dir_L3_weight", r"more than one column named 'MI_dir_L3_weight'"),
    ],
)
def test_defects(tmp_path: Path, row: int, column: int, value: str, message: str) -> None:
    """Defects are found in rows beyond the cap, too."""
    write(tmp_path, {3: 12})
    change(tmp_path / "3.gafgyt.scan.csv", row, column, value)
    with pytest.raises(FlsuiteError, match=message) as error:
        read_nbaiot(tmp_path, chunk_rows=5, rows_per_file=5)
    assert "\n" not in str(error.value)


def test_all_gaps_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {3: 12})
    for row, column in ((4, 7), (11, 7), (2, 9)):
        change(tmp_path / "3.benign.csv", row, column, "")
    with pytest.raises(
        FlsuiteError,
        match=r"row 4, column 'MI_dir_L7_weight': .*in 2 rows",
    ):
        read_nbaiot(tmp_path, chunk_rows=3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"3\.benign\.csv is empty"),
        ([",".join(HEADER)], r"3\.benign\.csv has a header but no rows"),
        (
            [",".join(map(str, np.arange(115) / 7))] * 3,
            r"more than one|3\.benign\.csv has no header",
        ),
    ],
)
def test_files_without_rows_or_header(tmp_path: Path, lines: list[str], message: str) -> None:
    write(tmp_path, {3: 6})
    (tmp_path / "3.benign.csv").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(FlsuiteError, match=message):
        read_nbaiot(tmp_path)


def test_missing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FlsuiteError,
        match=r"not in .*1\.gafgyt\.combo\.csv",
    ):
        NBaIoT(root=str(tmp_path)).setup()
    with pytest.raises(FlsuiteError, match=r"N-BaIoT's device 2 is not in"):
        NBaIoT(root=str(folder), device=2).setup()


def test_a_device_must_be_whole(tmp_path: Path) -> None:
    write(tmp_path, {1: 6})
    (tmp_path / "1.mirai.udpplain.csv").unlink()
    with pytest.raises(
        FlsuiteError,
        match=r"device 1 lacks .*1\.mirai\.udpplain\.csv",
    ):
        read_nbaiot(tmp_path)


def test_too_few_for_a_test_split(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="the 5 rows that a test split needs"):
        read_nbaiot(write(tmp_path, {3: 4}))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"classes": "all"}, "binary, family, attack"),
        ({"device": 10}, "from 1 to 9"),
        ({"rows_per_file": 4}, "at least 5"),
    ],
)
def test_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        NBaIoT(**kwargs)


# A federation


def test_clients_are_devices(tmp_path: Path) -> None:
    write(tmp_path / "nbaiot", {1: 30, 3: 30, 7: 30})
    data = NBaIoT("family", root=str(tmp_path), clients=3, partition=Natural(), batch_size=16)
    made = trainer(rounds=5, max_epochs=2, evaluate_every=9)
    made.fit(classifier(lr=0.2), data)
    ids = data.federated.train.ids
    assert ids is not None
    assert [ids[rows].unique().tolist() for rows in data.federated.train.rows] == [[1], [3], [7]]
    federation, *clients = made.test()
    assert federation["accuracy"] > 0.9 and len(clients) == 3


def test_one_device_split_over_clients(tmp_path: Path) -> None:
    write(tmp_path, {1: 30})
    data = NBaIoT(device=1, root=str(tmp_path), clients=4, partition=Dirichlet(1.0), batch_size=16)
    made = trainer(rounds=2)
    made.fit(classifier(), data)
    assert (
        data.federated.train.rows.lengths().sum() + data.federated.val.rows.lengths().sum()
        == 11 * 24
    )
    assert len(data.federated.test.rows.values) == 11 * 6
    assert len(made.test()) == 5


def test_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(
        "data: {class_path: NBaIoT, init_args: {classes: attack, clients: 2, partition: Natural}}\n"
    )
    with pytest.raises(SystemExit) as exit:
        main(
            [
                "partition",
                "--config",
                "c.yaml",
                "--data.root",
                str(folder),
                "--data.rows_per_file",
                "10",
            ]
        )
    assert not exit.value.code
    assert {*pd.read_csv("c-partition.csv")["class"]} == {*TRAFFIC}
