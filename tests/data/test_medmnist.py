"""MedMNIST: tiny files in the publisher's layout, damaged files, and real files."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flsuite.data.datasets.medmnist import MedMNIST
from flsuite.data.spec import PublishedSplits
from flsuite.errors import FlsuiteError
from tests.conftest import published
from tests.data.readers import check


def read_medmnist(name: str, size: Any, root: Path, download: bool) -> PublishedSplits:
    return MedMNIST(name, size, root=root, download=download).load()


COUNTS = {"train": 6, "val": 3, "test": 4}


def medmnist_arrays(name: str, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    from medmnist import INFO

    info, arrays = INFO[name], {}
    labels, multilabel = len(info["label"]), info["task"].startswith("multi-label")
    for split, n in COUNTS.items():
        shape = (n, size, size, 3) if info["n_channels"] == 3 else (n, size, size)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        target = rng.integers(0, 2, (n, labels)) if multilabel else rng.integers(0, labels, (n, 1))
        arrays[f"{split}_labels"] = target.astype(np.uint8)
    return arrays


def publish(monkeypatch: pytest.MonkeyPatch, file: Path, name: str, suffix: str = "") -> None:
    """Set the package's checksum to that of the file."""
    from medmnist import INFO

    monkeypatch.setitem(INFO[name], f"MD5{suffix}", hashlib.md5(file.read_bytes()).hexdigest())


def save_npz(file: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


MED_TASKS = {
    "pathmnist": ("multiclass", 9),
    "chestmnist": ("multilabel", 14),
    "dermamnist": ("multiclass", 7),
    "octmnist": ("multiclass", 4),
    "pneumoniamnist": ("binary", 2),
    "retinamnist": ("ordinal", 5),
    "breastmnist": ("binary", 2),
    "bloodmnist": ("multiclass", 8),
    "tissuemnist": ("multiclass", 8),
    "organamnist": ("multiclass", 11),
    "organcmnist": ("multiclass", 11),
    "organsmnist": ("multiclass", 11),
}


@pytest.mark.parametrize("name", MED_TASKS)
def test_medmnist_sets(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    offline: list[str],
) -> None:
    arrays = medmnist_arrays(name, 28, rng)
    save_npz(tmp_path / f"{name}.npz", arrays)
    publish(monkeypatch, tmp_path / f"{name}.npz", name)
    source = MedMNIST(name, root=str(tmp_path)).load()
    check(source, (3 if arrays["val_images"].ndim == 4 else 1, 28, 28), **COUNTS)
    assert (source.spec.task, source.spec.num_classes) == MED_TASKS[name]
    assert source.val is not None
    assert np.array_equal(
        source.val.x.numpy().reshape(arrays["val_images"].shape), arrays["val_images"]
    )
    assert np.array_equal(
        source.val.y.numpy().reshape(arrays["val_labels"].shape), arrays["val_labels"]
    )
    assert not offline


def test_medmnist_sizes_have_their_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    save_npz(tmp_path / "bloodmnist_64.npz", medmnist_arrays("bloodmnist", 64, rng))
    publish(monkeypatch, tmp_path / "bloodmnist_64.npz", "bloodmnist", "_64")
    check(read_medmnist("bloodmnist", 64, tmp_path, False), (3, 64, 64), **COUNTS)


def test_medmnist_class_names() -> None:
    from flsuite.data.datasets.medmnist import _info, _spec

    assert _spec(_info("pneumoniamnist"), 28).class_names == ("normal", "pneumonia")
    assert _spec(_info("retinamnist"), 28).class_names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize("name", ["retina", "RetinaMNIST", "organmnist3d", ""])
def test_medmnist_unknown_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=f"MedMNIST: name must be .*got {name!r}"):
        read_medmnist(name, 28, tmp_path, False)


@pytest.mark.parametrize("size", [0, 32, 256])
def test_medmnist_unknown_size(size: int, tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=f"MedMNIST: size must be .*got {size}"):
        read_medmnist("breastmnist", size, tmp_path, False)


def test_medmnist_missing(tmp_path: Path, offline: list[str]) -> None:
    with pytest.raises(FlsuiteError, match=r"breastmnist_64.npz is not in .*https://"):
        read_medmnist("breastmnist", 64, tmp_path, download=False)
    assert not offline


def test_medmnist_no_network(tmp_path: Path, offline: list[str]) -> None:
    root = tmp_path / "new"
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz is not in .*new.*no network"):
        read_medmnist("breastmnist", 28, root, download=True)
    assert offline and not list(root.iterdir()), "a failed download leaves no files"


def test_medmnist_root_is_a_file(tmp_path: Path, offline: list[str]) -> None:
    (tmp_path / "root").touch()
    with pytest.raises(FlsuiteError, match=r"could not be downloaded"):
        read_medmnist("breastmnist", 28, tmp_path / "root", download=True)


def test_medmnist_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, offline: list[str]
) -> None:
    away, root = tmp_path / "away.npz", tmp_path / "root"
    save_npz(away, medmnist_arrays("breastmnist", 28, rng))
    publish(monkeypatch, away, "breastmnist")

    def fetch(url: str, root: str, filename: str, md5: str) -> None:
        assert url.startswith("https://zenodo.org") and Path(root).name.startswith(".")
        (Path(root) / filename).write_bytes(away.read_bytes())

    monkeypatch.setattr("torchvision.datasets.utils.download_url", fetch)
    check(read_medmnist("breastmnist", 28, root, download=True), (1, 28, 28), **COUNTS)
    assert [path.name for path in root.iterdir()] == ["breastmnist.npz"]


def test_medmnist_wrong_checksum(
    tmp_path: Path, rng: np.random.Generator, offline: list[str]
) -> None:
    save_npz(tmp_path / "breastmnist.npz", medmnist_arrays("breastmnist", 28, rng))
    before = (tmp_path / "breastmnist.npz").read_bytes()
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz is damaged .*MD5"):
        read_medmnist("breastmnist", 28, tmp_path, download=True)
    assert (tmp_path / "breastmnist.npz").read_bytes() == before and not offline


def test_medmnist_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breastmnist.npz").touch()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("permission denied")

    monkeypatch.setattr("torchvision.datasets.utils.open", refuse, raising=False)
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz cannot be read"):
        read_medmnist("breastmnist", 28, tmp_path, False)


@pytest.mark.parametrize("keep", [0, 10, 1000, -30])
def test_medmnist_truncated(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    file = tmp_path / "breastmnist.npz"
    save_npz(file, medmnist_arrays("breastmnist", 28, rng))
    file.write_bytes(file.read_bytes()[:keep])
    publish(monkeypatch, file, "breastmnist")
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz is damaged .*delete it"):
        read_medmnist("breastmnist", 28, tmp_path, False)


def test_medmnist_flipped_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    file = tmp_path / "breastmnist.npz"
    save_npz(file, medmnist_arrays("breastmnist", 28, rng))
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 255
    file.write_bytes(raw)
    publish(monkeypatch, file, "breastmnist")
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz is damaged .*delete it"):
        read_medmnist("breastmnist", 28, tmp_path, False)


BAD_ARRAYS = {
    "no key": ("val_labels", None, "val_labels"),
    "other size": (
        "val_images",
        np.zeros((3, 32, 32), np.uint8),
        "val_images are uint8 .3, 32, 32, 1",
    ),
    "floats": ("val_images", np.zeros((3, 28, 28), np.float32), "val_images are float32"),
    "fewer labels": (
        "test_labels",
        np.zeros((3, 1), np.uint8),
        "test_labels have shape .3, 1. for 4",
    ),
    "two columns": ("test_labels", np.zeros((4, 2), np.uint8), "test_labels have shape .4, 2."),
    "class 2 of 2": ("test_labels", np.full((4, 1), 2, np.uint8), "test_labels are outside"),
    "objects": ("test_labels", np.array([[None]] * 4), "allow_pickle"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_medmnist_bad_arrays(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    key, value, message = BAD_ARRAYS[case]
    arrays = medmnist_arrays("breastmnist", 28, rng) | {key: value}
    save_npz(tmp_path / "breastmnist.npz", {k: v for k, v in arrays.items() if v is not None})
    publish(monkeypatch, tmp_path / "breastmnist.npz", "breastmnist")
    with pytest.raises(FlsuiteError, match=rf"breastmnist.npz is damaged .*{message}.*delete it"):
        read_medmnist("breastmnist", 28, tmp_path, False)


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "task"),
    [
        ("breastmnist", (1, 28, 28), (546, 78, 156), "binary"),
        ("retinamnist", (3, 28, 28), (1080, 120, 400), "ordinal"),
    ],
)
def test_real_medmnist(
    name: str, shape: tuple[int, int, int], sizes: tuple[int, int, int], task: str
) -> None:
    source = read_medmnist(name, 28, published(f"{name}.npz"), download=False)
    check(source, shape, train=sizes[0], val=sizes[1], test=sizes[2])
    assert source.spec.task == task
