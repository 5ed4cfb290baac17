"""Tests of FEMNIST: tiny files in LEAF's layouts and as arrays, missing and damaged files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsuite.common.errors import FlsuiteError
from flsuite.data import FEMNIST

WRITERS = {"f0002_7": 20, "f0001_41": 10, "f0003_1": 3}


def samples(writer: str, number: int) -> dict[str, Any]:
    """Return samples in LEAF's format: white (1), except for the pixel of the sample's number."""
    x = np.ones((number, 784))
    x[np.arange(number), np.arange(number)] = 0.2
    return {"x": x.tolist(), "y": [(k + len(writer)) % 62 for k in range(number)]}


def write_leaf(file: Path, writers: dict[str, int], **changes: Any) -> Path:
    content = {
        "users": list(writers),
        "num_samples": list(writers.values()),
        "user_data": {writer: samples(writer, number) for writer, number in writers.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content | changes))
    return file


def test_all_data(tmp_path: Path) -> None:
    """Two of twenty samples are held out, one of ten, none of three."""
    first, *others = WRITERS.items()
    write_leaf(tmp_path / "all_data_0.json", dict([first]))
    write_leaf(tmp_path / "all_data_1.json", dict(others))
    source = FEMNIST(root=tmp_path).load()
    assert source.spec.shape == (1, 28, 28) and source.val is None
    assert source.spec.num_classes == len(source.spec.class_names) == 62
    assert [source.spec.class_names[k] for k in (0, 10, 36)] == ["0", "A", "a"]
    assert source.train.x.shape == (30, 28, 28, 1) and source.train.x.dtype == torch.uint8
    assert source.train.x.unique().tolist() == [51, 255]
    assert source.train.y.dtype == torch.int64
    assert source.train.ids is not None and source.test.ids is not None
    # Numbered by name: f0001_41, f0002_7, f0003_1.
    assert source.train.ids.bincount().tolist() == [9, 18, 3]
    assert source.test.ids.bincount(minlength=3).tolist() == [1, 2, 0]
    assert torch.equal(source.test.x, FEMNIST(root=tmp_path).load().test.x)


def test_train_and_test_folders(tmp_path: Path) -> None:
    """LEAF's own split is kept, and a writer has the same number in both splits."""
    write_leaf(tmp_path / "data" / "train" / "a.json", WRITERS)
    write_leaf(tmp_path / "data" / "test" / "b.json", {"f0002_7": 2, "f0009_9": 1})
    source = FEMNIST(root=tmp_path).load()
    assert len(source.train) == 33 and len(source.test) == 3
    assert source.test.ids is not None
    assert source.test.ids.tolist() == [1, 1, 3]


@pytest.mark.parametrize("folder", ["train", "all_data", "data/all_data"])
def test_other_places(tmp_path: Path, folder: str) -> None:
    write_leaf(tmp_path / folder / "all_data_0.json", WRITERS)
    source = FEMNIST(root=tmp_path).load()
    assert (len(source.train), len(source.test)) == (30, 3)


@pytest.mark.parametrize("writers", [np.repeat(["b", "a"], 10), np.repeat([7, 3], 10)])
@pytest.mark.parametrize("kind", ["bytes", "floats"])
def test_arrays(tmp_path: Path, writers: np.ndarray, kind: str) -> None:
    x = np.arange(20, dtype=np.uint8)[:, None] * np.ones((1, 784), np.uint8)
    stored = x if kind == "bytes" else (x / 255).astype(np.float32).reshape(-1, 28, 28)
    np.savez(tmp_path / "femnist.npz", X=stored, y=np.arange(20), writers=writers)
    source = FEMNIST(root=tmp_path).load()
    assert source.train.ids is not None
    assert source.train.ids.bincount().tolist() == [9, 9]
    assert torch.equal(source.train.x[:, 0, 0, 0].long(), source.train.y)
    assert ((source.train.y < 10) == (source.train.ids == 1)).all()


def test_missing_or_too_few(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=r"not in .*preprocess\.sh.*npz.*data\.root"):
        FEMNIST(root=str(tmp_path)).setup()
    write_leaf(tmp_path / "all_data_0.json", {"f0001_41": 4})
    with pytest.raises(FlsuiteError, match="five samples"):
        FEMNIST(root=tmp_path).load()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": [4]},
        {"num_samples": [3, 3]},
        {"users": []},
        {"users": ["nobody"]},
        {"user_data": {"w": {"x": [[0.5] * 783] * 3, "y": [1, 2, 3]}}},
        {"user_data": {"w": {"x": [[1.5] * 784] * 3, "y": [1, 2, 3]}}},
        {"user_data": {"w": {"x": [[0.5] * 784] * 3, "y": [1, 2, 62]}}},
        {"user_data": {"w": {"x": [[0.5] * 784] * 3, "y": [1, 2]}}},
        {"user_data": {"w": {"x": [], "y": []}}, "num_samples": [0]},
    ],
)
def test_damaged_content(tmp_path: Path, changes: dict[str, Any]) -> None:
    file = write_leaf(tmp_path / "all_data_0.json", {"w": 3}, **changes)
    with pytest.raises(FlsuiteError, match=rf"{file.name} is damaged.*delete it and make it"):
        FEMNIST(root=tmp_path).load()


@pytest.mark.parametrize("name", ["all_data_0.json", "femnist.npz"])
def test_damaged_file(tmp_path: Path, name: str) -> None:
    for content in (b"", b"{", b"\x93NUMPY", b"\xff\xfe\x00"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FlsuiteError, match=f"{name} is damaged"):
            FEMNIST(root=tmp_path).load()


def test_damaged_arrays(tmp_path: Path) -> None:
    x, y, writers = np.zeros((4, 784), np.uint8), np.zeros(4, int), np.zeros(3, int)
    np.savez(tmp_path / "femnist.npz", X=x, y=y, writers=writers)
    with pytest.raises(FlsuiteError, match="writers have shape"):
        FEMNIST(root=tmp_path).load()
