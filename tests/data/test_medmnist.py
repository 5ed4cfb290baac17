"""MedMNIST: tiny files in the publisher's layout, damaged files, and real files."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from medmnist import INFO

from flsuite.common.errors import FlsuiteError
from flsuite.data.datasets.medmnist import MedMNIST, _info, _spec
from flsuite.data.federated import PublishedSplits
from tests.conftest import published
from tests.data.readers import check


def read_medmnist(name: str, size: Any, root: Path, download: bool = False) -> PublishedSplits:
    return MedMNIST(name, size, root=root, download=download).load()


BREAST = "breastmnist"
COUNTS = {"train": 6, "val": 3, "test": 4}


def arrays_of(name: str, size: int = 28) -> dict[str, np.ndarray]:
    info, arrays, rng = INFO[name], {}, np.random.default_rng(0)
    labels, multilabel = len(info["label"]), info["task"].startswith("multi-label")
    for split, n in COUNTS.items():
        colors = (3,) if info["n_channels"] == 3 else ()
        shape = (n, *[size] * (3 if name.endswith("3d") else 2), *colors)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        target = rng.integers(0, 2, (n, labels)) if multilabel else rng.integers(0, labels, (n, 1))
        arrays[f"{split}_labels"] = target.astype(np.uint8)
    return arrays


class Publisher:
    """Writes files of a set, and sets the package's checksum to theirs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def save(self, arrays: dict[str, Any], name: str = BREAST, suffix: str = "") -> Path:
        file = self.folder / f"{name}{suffix}.npz"
        np.savez_compressed(file, **arrays)
        return self.check(file, name, suffix)

    def check(self, file: Path, name: str = BREAST, suffix: str = "") -> Path:
        checksum = hashlib.md5(file.read_bytes()).hexdigest()
        self.monkeypatch.setitem(INFO[name], f"MD5{suffix}", checksum)
        return file


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    return Publisher(tmp_path, monkeypatch)


MED_TASKS = {
    "chestmnist": ("multilabel", 14),
    "pneumoniamnist": ("binary", 2),
    "retinamnist": ("ordinal", 5),
    "bloodmnist": ("multiclass", 8),
    "organamnist": ("multiclass", 11),
    "organmnist3d": ("multiclass", 11),
    "nodulemnist3d": ("binary", 2),
    "adrenalmnist3d": ("binary", 2),
    "fracturemnist3d": ("multiclass", 3),
    "vesselmnist3d": ("binary", 2),
    "synapsemnist3d": ("binary", 2),
}


@pytest.mark.parametrize("name", MED_TASKS)
def test_medmnist_sets(name: str, publisher: Publisher, offline: list[str]) -> None:
    arrays = arrays_of(name)
    publisher.save(arrays, name)
    source = MedMNIST(name, root=str(publisher.folder)).load()
    images, labels = arrays["val_images"], arrays["val_labels"]
    sides = (28, 28, 28) if name.endswith("3d") else (28, 28)
    check(source, (INFO[name]["n_channels"], *sides), **COUNTS)
    assert (source.spec.task, source.spec.num_classes) == MED_TASKS[name]
    assert source.val is not None
    assert np.array_equal(source.val.x.numpy().reshape(images.shape), images)
    assert np.array_equal(source.val.y.numpy().reshape(labels.shape), labels)
    assert not offline


def test_medmnist_sizes_have_their_own_files(publisher: Publisher) -> None:
    publisher.save(arrays_of("bloodmnist", 64), "bloodmnist", "_64")
    check(read_medmnist("bloodmnist", 64, publisher.folder), (3, 64, 64), **COUNTS)
    publisher.save(arrays_of("vesselmnist3d", 64), "vesselmnist3d", "_64")
    check(read_medmnist("vesselmnist3d", 64, publisher.folder), (1, 64, 64, 64), **COUNTS)


def test_medmnist_class_names() -> None:
    assert _spec(_info("pneumoniamnist"), 28).class_names == ("normal", "pneumonia")
    assert _spec(_info("retinamnist"), 28).class_names == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        *((name, 28, f"name must be .*got {name!r}") for name in ("retina", "organmnist2d", "")),
        ("organmnist3d", 128, "size of organmnist3d must be 28 or 64, got 128"),
        *((BREAST, size, f"size must be .*got {size}") for size in (0, 32, 256)),
    ],
)
def test_medmnist_unknown_sets(name: str, size: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match=f"MedMNIST: {said}"):
        read_medmnist(name, size, tmp_path)


def test_medmnist_missing(tmp_path: Path, offline: list[str]) -> None:
    with pytest.raises(FlsuiteError, match=r"breastmnist_64.npz is not in .*https://"):
        read_medmnist(BREAST, 64, tmp_path)
    assert not offline
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz is not in .*new.*no network"):
        read_medmnist(BREAST, 28, tmp_path / "new", download=True)
    assert offline and not list((tmp_path / "new").iterdir()), "a failed download leaves no files"
    (tmp_path / "root").touch()
    with pytest.raises(FlsuiteError, match=r"could not be downloaded"):
        read_medmnist(BREAST, 28, tmp_path / "root", download=True)


def test_medmnist_download(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    away, root = publisher.save(arrays_of(BREAST)), publisher.folder / "root"

    def fetch(url: str, root: str, filename: str, md5: str) -> None:
        assert url.startswith("https://zenodo.org") and Path(root).name.startswith(".")
        (Path(root) / filename).write_bytes(away.read_bytes())

    monkeypatch.setattr("torchvision.datasets.utils.download_url", fetch)
    check(read_medmnist(BREAST, 28, root, download=True), (1, 28, 28), **COUNTS)
    assert [path.name for path in root.iterdir()] == ["breastmnist.npz"]


def test_medmnist_wrong_checksum(tmp_path: Path, offline: list[str]) -> None:
    file = tmp_path / "breastmnist.npz"
    np.savez_compressed(file, **arrays_of(BREAST))  # type: ignore[arg-type]
    before = file.read_bytes()
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz is damaged .*MD5"):
        read_medmnist(BREAST, 28, tmp_path, download=True)
    assert file.read_bytes() == before and not offline


def test_medmnist_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breastmnist.npz").touch()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("permission denied")

    monkeypatch.setattr("torchvision.datasets.utils.open", refuse, raising=False)
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz cannot be read"):
        read_medmnist(BREAST, 28, tmp_path)


def test_medmnist_damaged(publisher: Publisher) -> None:
    file = publisher.save(arrays_of(BREAST))
    whole = file.read_bytes()
    flipped = whole[:1000] + bytes([whole[1000] ^ 255]) + whole[1001:]
    for content in (*(whole[:keep] for keep in (0, 10, 1000, -30)), flipped):
        file.write_bytes(content)
        publisher.check(file)
        with pytest.raises(FlsuiteError, match=r"breastmnist.npz is damaged .*delete it"):
            read_medmnist(BREAST, 28, publisher.folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("val_labels", None, "val_labels"),
        ("val_images", np.zeros((3, 32, 32), np.uint8), "val_images are uint8 .3, 32, 32, 1"),
        ("val_images", np.zeros((3, 28, 28), np.float32), "val_images are float32"),
        ("val_images", np.zeros((3, 28, 28, 28), np.uint8), "val_images are uint8 .3, 28, 28, 28."),
        ("test_labels", np.zeros((3, 1), np.uint8), "test_labels have shape .3, 1. for 4"),
        ("test_labels", np.zeros((4, 2), np.uint8), "test_labels have shape .4, 2."),
        ("test_labels", np.full((4, 1), 2, np.uint8), "test_labels are outside"),
        ("test_labels", np.array([[None]] * 4), "allow_pickle"),
    ],
    ids=[
        "no key",
        "size",
        "floats",
        "volumes",
        "fewer labels",
        "two columns",
        "class 2 of 2",
        "objects",
    ],
)
def test_medmnist_bad_arrays(key: str, value: Any, message: str, publisher: Publisher) -> None:
    arrays = arrays_of(BREAST) | {key: value}
    publisher.save({k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(FlsuiteError, match=rf"breastmnist.npz is damaged .*{message}.*delete it"):
        read_medmnist(BREAST, 28, publisher.folder)


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "task"),
    [
        ("breastmnist", (1, 28, 28), (546, 78, 156), "binary"),
        ("retinamnist", (3, 28, 28), (1080, 120, 400), "ordinal"),
    ],
)
def test_real_medmnist(name: str, shape: Any, sizes: tuple[int, int, int], task: str) -> None:
    source = read_medmnist(name, 28, published(f"{name}.npz"))
    check(source, shape, train=sizes[0], val=sizes[1], test=sizes[2])
    assert source.spec.task == task
