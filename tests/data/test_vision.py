"""Torchvision's sets: tiny files in the publisher's layout, damaged files, and real files."""

import hashlib
import pickle
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torchvision import datasets

from flsuite.common.errors import FlsuiteError
from flsuite.data.datasets import vision
from flsuite.data.datasets.medmnist import MedMNIST
from flsuite.data.datasets.vision import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    GTSRB,
    MNIST,
    SVHN,
    EMNISTSplit,
    FashionMNIST,
)
from flsuite.data.federated import PublishedSplits
from flsuite.data.images import resize_images
from tests.conftest import published
from tests.data.readers import check, save_image


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


def idx(array: np.ndarray) -> bytes:
    """Encode an array in the format of the MNIST files.

    It is a magic number with the dtype, uint8, and the rank, then big-endian sizes, then the bytes.
    """
    head = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, name: str = "MNIST", train: int = 12) -> np.ndarray:
    """Write four raw files, and return the training images."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (train, 28, 28))
    for part, array in (("train", images), ("t10k", images[:5])):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(array))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(len(array)) % 10))
    return images


def read_mnist(root: Path, download: bool = False) -> PublishedSplits:
    return MNIST(root=root, download=download).load()


@pytest.mark.parametrize("module", [MNIST, FashionMNIST])
def test_mnist(module: type[MNIST], tmp_path: Path, offline: list[str]) -> None:
    images = write_mnist(tmp_path, module.__name__)
    source = module(root=str(tmp_path)).load()
    check(source, (1, 28, 28), train=12, test=5)
    assert np.array_equal(source.train.x[..., 0].numpy(), images)
    assert source.train.y.tolist() == [*range(10), 0, 1] and source.val is None
    assert not offline, "files that exist are not downloaded"


def test_one_of_several_processes_downloads_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, calls = write_mnist(tmp_path / "there"), list[str]()

    def slowly(make: Any, splits: Any, what: str) -> None:
        calls.append(what)
        for file in sorted((tmp_path / "there" / "MNIST" / "raw").iterdir()):
            own = tmp_path / "here" / "MNIST" / "raw" / file.name
            own.parent.mkdir(parents=True, exist_ok=True)
            own.touch()  # it exists before it is complete
            time.sleep(0.05)
            own.write_bytes(file.read_bytes())

    monkeypatch.setattr(vision, "_download", slowly)
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(read_mnist, tmp_path / "here", True) for _ in range(3)]
    for load in loads:
        assert np.array_equal(load.result().train.x[..., 0].numpy(), images)
    assert len(calls) == 1


def test_mnist_damaged(tmp_path: Path, offline: list[str]) -> None:
    write_mnist(tmp_path)
    for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        file = tmp_path / "MNIST" / "raw" / name
        whole = file.read_bytes()
        for keep in (0, 3, 9, len(whole) - 1):
            file.write_bytes(whole[:keep])
            with pytest.raises(FlsuiteError, match=r"files of MNIST in .*MNIST/raw are damaged"):
                read_mnist(tmp_path, download=True)
        file.write_bytes(whole)
    assert not offline
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    for array, reason in (
        (np.zeros(11), "12 images and 11 labels"),
        (np.full(12, 10), "from 10 to 10 for 10 classes"),
    ):
        labels.write_bytes(idx(array))
        with pytest.raises(FlsuiteError, match=f"damaged .*{reason}"):
            read_mnist(tmp_path)


@pytest.mark.parametrize("module", [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, SVHN, GTSRB])
def test_missing(module: type[MNIST], tmp_path: Path, offline: list[str]) -> None:
    name = module.__name__
    with pytest.raises(FlsuiteError, match=rf"^{name} is not in {tmp_path} .*data.download"):
        module(root=str(tmp_path), download=False).load()
    assert not offline
    with pytest.raises(FlsuiteError, match=f"^{name} is .*no network in tests") as caught:
        module(root=str(tmp_path), download=True).load()
    assert offline and "\n" not in str(caught.value)


def write_emnist(root: Path, split: str, labels: np.ndarray) -> np.ndarray:
    """Write transposed images, as published, and return the upright ones."""
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    upright = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28))
    images, targets = idx(upright.transpose(0, 2, 1)), idx(labels)
    for part in ("train", "test"):
        (raw / f"emnist-{split}-{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"emnist-{split}-{part}-labels-idx1-ubyte").write_bytes(targets)
    return upright


@pytest.mark.parametrize(
    ("split", "classes"), [("byclass", 62), ("balanced", 47), ("letters", 26), ("mnist", 10)]
)
def test_emnist(split: str, classes: int, tmp_path: Path, offline: list[str]) -> None:
    first = 1 if split == "letters" else 0
    upright = write_emnist(tmp_path, split, np.arange(classes) + first)
    source = EMNIST(split, root=str(tmp_path)).load()
    check(source, (1, 28, 28), train=classes, test=classes)
    assert np.array_equal(source.train.x[..., 0].numpy(), upright)
    assert source.train.y.tolist() == list(range(classes))
    assert source.spec.num_classes == classes
    assert source.spec.class_names[0] == ("a" if split == "letters" else "0")
    assert not offline


def test_emnist_unknown_split() -> None:
    assert datasets.EMNIST.splits == get_args(EMNISTSplit)
    with pytest.raises(FlsuiteError, match=r"EMNIST: split must be one of byclass,"):
        EMNIST("lettres")


CIFAR_FILES = {
    "CIFAR10": (
        "cifar-10-batches-py",
        [f"data_batch_{k}" for k in range(1, 6)],
        "test_batch",
        "batches.meta",
    ),
    "CIFAR100": ("cifar-100-python", ["train"], "test", "meta"),
}


def write_cifar(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Write pickled batches of four images, and set their checksums.

    Returns all images, those of the test batch last, as ``(n, 3, 32, 32)``.
    """
    reader = getattr(datasets, name)
    folder, train, test, meta = CIFAR_FILES[name]
    classes, labels = (10, "labels") if name == "CIFAR10" else (100, "fine_labels")
    (root / folder).mkdir(parents=True)
    images, sums = [], {}

    def dump(file: str, content: dict[str, Any]) -> None:
        (root / folder / file).write_bytes(pickle.dumps(content))
        sums[file] = md5(root / folder / file)

    for k, file in enumerate([*train, test]):
        rng = np.random.default_rng(k)
        images.append(rng.integers(0, 256, (4, 3 * 32 * 32), dtype=np.uint8))
        dump(file, {"data": images[-1], labels: [k, k + 1, k + 2, k + 3]})
    dump(meta, {reader.meta["key"]: [f"class {k}" for k in range(classes)]})
    monkeypatch.setattr(reader, "train_list", [[file, sums[file]] for file in train])
    monkeypatch.setattr(reader, "test_list", [[test, sums[test]]])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": sums[meta]})
    return np.concatenate(images).reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("module", [CIFAR10, CIFAR100])
def test_cifar(
    module: type[CIFAR10], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    images = write_cifar(tmp_path, module.__name__, monkeypatch)
    source = module(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=len(images) - 4, test=4)
    assert np.array_equal(source.train.x.permute(0, 3, 1, 2).numpy(), images[:-4])
    assert np.array_equal(source.test.x.permute(0, 3, 1, 2).numpy(), images[-4:])
    assert source.train.y[:4].tolist() == [0, 1, 2, 3]
    assert source.spec.class_names[3] == "class 3"

    folder, _, test, meta = CIFAR_FILES[module.__name__]
    for file in (tmp_path / folder / test, tmp_path / folder / meta):
        whole = file.read_bytes()
        file.write_bytes(whole[:-7])
        reason = rf"files of {module.__name__} in .*{folder} are damaged"
        with pytest.raises(FlsuiteError, match=reason):
            module(root=tmp_path, download=True).load()
        file.write_bytes(whole)
    assert not offline


def test_svhn(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    images, splits = rng.integers(0, 256, (32, 32, 3, 10), dtype=np.uint8), {}
    for split in ("train", "test"):
        file = tmp_path / f"{split}_32x32.mat"
        scipy_io.savemat(file, {"X": images, "y": np.arange(1, 11, dtype=np.uint8)[:, None]})
        splits[split] = ["http://nowhere", file.name, md5(file)]
    monkeypatch.setattr(datasets.SVHN, "split_list", splits)
    source = SVHN(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=10, test=10)
    assert np.array_equal(source.train.x.numpy(), images.transpose(3, 0, 1, 2))
    assert source.train.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert source.spec.class_names[9] == "9"

    file.write_bytes(file.read_bytes()[:500])
    for checksum in (splits["test"][2], md5(file)):
        splits["test"][2] = checksum
        with pytest.raises(FlsuiteError, match=rf"files of SVHN in {tmp_path} are damaged"):
            SVHN(root=tmp_path, download=True).load()
    assert not offline


def write_gtsrb(root: Path, rng: np.random.Generator) -> None:
    """Write a flat training image per class, of different sizes, and two test images."""
    folder = root / "gtsrb" / "GTSRB"
    for label in range(43):
        size = (15 + 2 * label, 20 + label, 3)
        file = folder / "Training" / f"{label:05d}" / "00000_00000.ppm"
        save_image(file, np.full(size, 5 * label, np.uint8))
    lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for row, label in enumerate((42, 7)):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        save_image(folder / "Final_Test" / "Images" / f"{row:05d}.ppm", pixels)
        lines.append(f"{row:05d}.ppm;32;32;1;1;30;30;{label}")
    (root / "gtsrb" / "GT-final_test.csv").write_text("\n".join(lines) + "\n")


def test_gtsrb(tmp_path: Path, rng: np.random.Generator, offline: list[str]) -> None:
    write_gtsrb(tmp_path, rng)
    source = GTSRB(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=43, test=2)
    assert source.train.y.tolist() == list(range(43)) and source.test.y.tolist() == [42, 7]
    assert (source.train.x == 5 * torch.arange(43).view(-1, 1, 1, 1)).all()
    assert source.val is None and source.spec.num_classes == 43
    assert GTSRB(size=20, root=str(tmp_path)).load().spec.shape == (3, 20, 20)
    assert not offline


def test_gtsrb_resizes_as_all_images_are_resized(tmp_path: Path, rng: np.random.Generator) -> None:
    write_gtsrb(tmp_path, rng)
    pixels = rng.integers(0, 256, (75, 51, 3), dtype=np.uint8)
    save_image(tmp_path / "gtsrb" / "GTSRB" / "Training" / "00003" / "00000_00000.ppm", pixels)
    ours = resize_images(torch.from_numpy(pixels)[None], 32)
    theirs = GTSRB(root=str(tmp_path)).load().train.x[3]
    assert (theirs.int() - ours[0].int()).abs().max() <= 2, "but for PIL's rounding between axes"


def test_gtsrb_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    write_gtsrb(tmp_path, rng)
    folder = tmp_path / "gtsrb" / "GTSRB" / "Training" / "00005"
    file = folder / "00000_00000.ppm"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FlsuiteError, match=r"files of GTSRB in .*gtsrb are damaged"):
        GTSRB(root=str(tmp_path)).load()
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(FlsuiteError, match=r"GTSRB is not in .*Training/00005/ is mis"):
        GTSRB(root=str(tmp_path), download=False).load()


def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise ImportError("No module named 'scipy'")

    write_mnist(tmp_path)
    monkeypatch.setattr(datasets.MNIST, "_load_data", refuse)
    with pytest.raises(FlsuiteError, match=r"MNIST needs a package that is not installed"):
        read_mnist(tmp_path)


@pytest.mark.parametrize(
    ("module", "folder"),
    [
        (MNIST(download=False), ".cache/flsuite"),
        (MedMNIST("breastmnist", download=False), ".medmnist"),
    ],
)
def test_default_roots(
    module: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLSUITE_DATA_ROOT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FlsuiteError, match=rf"is not in {tmp_path / folder}"):
        module.load()


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_real_mnist(name: str) -> None:
    kind = {"MNIST": MNIST, "FashionMNIST": FashionMNIST}[name]
    source = kind(root=published(f"{name}/raw/train-images-idx3-ubyte"), download=False).load()
    check(source, (1, 28, 28), train=60000, test=10000)
    assert source.spec.task == "multiclass" and source.spec.num_classes == 10


@pytest.mark.long
def test_real_cifar10() -> None:
    source = CIFAR10(root=published("cifar-10-batches-py/data_batch_1"), download=False).load()
    check(source, (3, 32, 32), train=50000, test=10000)
    assert torch.bincount(source.train.y).tolist() == [5000] * 10
    assert source.spec.class_names[0] == "airplane"
