"""Tests of the readers: on tiny files in the publisher's layout, damaged files, and real files."""

import gzip
import hashlib
import math
import pickle
import shutil
import struct
import urllib.error
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from flsuite.data.datasets.cinic10 import CINIC10, CLASSES
from flsuite.data.datasets.digits import Digits
from flsuite.data.datasets.medmnist import MedMNIST
from flsuite.data.datasets.synthetic import Synthetic, bayes_accuracy, simplex_means
from flsuite.data.datasets.vision import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    GTSRB,
    MNIST,
    SVHN,
    FashionMNIST,
)
from flsuite.data.images import resize_images
from flsuite.data.spec import DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError
from flsuite.random import torch_generator
from tests.conftest import published


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse all network access, and return the addresses that were requested."""
    requested: list[str] = []

    def refuse(request: Any, *args: Any, **kwargs: Any) -> None:
        requested.append(getattr(request, "full_url", request))
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return requested


def read_medmnist(name: str, size: Any, root: Path, download: bool) -> PublishedSplits:
    return MedMNIST(name, size, root=root, download=download).load()


def read_torchvision(name: str, root: Path, download: bool) -> PublishedSplits:
    kinds = {kind.__name__: kind for kind in (MNIST, FashionMNIST, CIFAR10, CIFAR100, SVHN)}
    return kinds[name](root=root, download=download).load()


def check(source: PublishedSplits, shape: tuple[int, ...], **sizes: int) -> None:
    """Check sizes, shapes and dtypes of an image set."""
    channels, height, width = shape
    assert source.spec.shape == shape
    assert len(source.spec.class_names) == source.spec.num_classes
    for split, size in sizes.items():
        arrays = getattr(source, split)
        assert isinstance(arrays, DataSplit)
        assert arrays.x.shape == (size, height, width, channels)
        assert arrays.x.dtype == torch.uint8
        assert arrays.x.is_contiguous()
        if source.spec.task == "multilabel":
            assert (
                arrays.y.shape == (size, source.spec.num_classes) and arrays.y.dtype == torch.uint8
            )
        else:
            assert arrays.y.shape == (size,) and arrays.y.dtype == torch.int64
            assert arrays.y.min() >= 0 and arrays.y.max() < source.spec.num_classes


# Digits


def test_digits() -> None:
    source = Digits().load()
    check(source, (1, 8, 8), train=1437, test=360)
    assert source.val is None and source.spec.task == "multiclass"
    assert source.train.x.max() == 255 and source.train.x.min() == 0
    share = torch.bincount(source.test.y) / (
        torch.bincount(source.test.y) + torch.bincount(source.train.y)
    )
    assert torch.all((share - 0.2).abs() < 0.005), "the split is stratified"


def test_digits_split_is_fixed() -> None:
    first, second = Digits().load(), Digits(seed=7).load()
    assert torch.equal(first.test.x, second.test.x) and torch.equal(first.train.y, second.train.y)


# MedMNIST

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
    with pytest.raises(
        FlsuiteError, match=rf"MedMNIST: name must be one of pathmnist, .*organsmnist, got {name!r}"
    ):
        read_medmnist(name, 28, tmp_path, False)


@pytest.mark.parametrize("size", [0, 32, 256])
def test_medmnist_unknown_size(size: int, tmp_path: Path) -> None:
    with pytest.raises(
        FlsuiteError, match=rf"MedMNIST: size must be one of 28, 64, 128, 224, got {size}"
    ):
        read_medmnist("breastmnist", size, tmp_path, False)


def test_medmnist_missing(tmp_path: Path, offline: list[str]) -> None:
    with pytest.raises(
        FlsuiteError,
        match=r"breastmnist_64.npz is not in .*; set data.download or put https://\S+_64.npz",
    ):
        read_medmnist("breastmnist", 64, tmp_path, download=False)
    assert not offline


def test_medmnist_no_network(tmp_path: Path, offline: list[str]) -> None:
    root = tmp_path / "new"
    with pytest.raises(
        FlsuiteError,
        match=r"breastmnist.npz is not in .*new.*no network in tests.*put https://\S+ there",
    ):
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
    with pytest.raises(
        FlsuiteError,
        match=r"breastmnist.npz is damaged .*MD5 is \w+, the published one 750601b1.*delete it",
    ):
        read_medmnist("breastmnist", 28, tmp_path, download=True)
    assert (tmp_path / "breastmnist.npz").read_bytes() == before and not offline


def test_medmnist_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breastmnist.npz").touch()

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("permission denied")

    monkeypatch.setattr("torchvision.datasets.utils.open", refuse, raising=False)
    with pytest.raises(FlsuiteError, match=r"breastmnist.npz cannot be read .permission denied"):
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


# Torchvision


def idx(array: np.ndarray) -> bytes:
    """Encode an array in the format of the MNIST files.

    It is a magic number with the dtype, uint8, and the rank, then big-endian sizes, then the bytes.
    """
    return (
        struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_mnist(
    root: Path, name: str, rng: np.random.Generator, train: int = 12, test: int = 5
) -> np.ndarray:
    """Write four raw files, and return the training images."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    images = {
        part: rng.integers(0, 256, (n, 28, 28)) for part, n in (("train", train), ("t10k", test))
    }
    for part, array in images.items():
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(array))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(len(array)) % 10))
    return images["train"]


@pytest.mark.parametrize("module", [MNIST, FashionMNIST])
def test_mnist(
    module: type[MNIST], tmp_path: Path, rng: np.random.Generator, offline: list[str]
) -> None:
    images = write_mnist(tmp_path, module.__name__, rng)
    source = module(root=str(tmp_path)).load()
    check(source, (1, 28, 28), train=12, test=5)
    assert np.array_equal(source.train.x[..., 0].numpy(), images)
    assert source.train.y.tolist() == [*range(10), 0, 1] and source.val is None
    assert not offline, "files that exist are not downloaded"


def test_mnist_unpacks_archives_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, offline: list[str]
) -> None:
    from torchvision import datasets

    images, resources = write_mnist(tmp_path, "MNIST", rng), []
    for file in sorted((tmp_path / "MNIST" / "raw").iterdir()):
        archive = file.with_name(f"{file.name}.gz")
        archive.write_bytes(gzip.compress(file.read_bytes()))
        resources.append((archive.name, hashlib.md5(archive.read_bytes()).hexdigest()))
        file.unlink()
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    source = read_torchvision("MNIST", tmp_path, download=True)
    assert np.array_equal(source.train.x[..., 0].numpy(), images) and not offline


def test_mnist_truncated(tmp_path: Path, rng: np.random.Generator, offline: list[str]) -> None:
    write_mnist(tmp_path, "MNIST", rng)
    for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        file = tmp_path / "MNIST" / "raw" / name
        whole = file.read_bytes()
        for keep in (0, 3, 9, len(whole) - 1):
            file.write_bytes(whole[:keep])
            with pytest.raises(
                FlsuiteError, match=r"files of MNIST in .*MNIST/raw are damaged .*delete them"
            ):
                read_torchvision("MNIST", tmp_path, download=True)
        file.write_bytes(whole)
    assert not offline


def test_mnist_labels_of_another_file(tmp_path: Path, rng: np.random.Generator) -> None:
    write_mnist(tmp_path, "MNIST", rng)
    file = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    file.write_bytes(idx(np.zeros(11)))
    with pytest.raises(FlsuiteError, match=r"damaged .*12 images and 11 labels"):
        read_torchvision("MNIST", tmp_path, download=False)
    file.write_bytes(idx(np.full(12, 10)))
    with pytest.raises(FlsuiteError, match=r"damaged .*from 10 to 10 for 10 classes"):
        read_torchvision("MNIST", tmp_path, download=False)


@pytest.mark.parametrize("module", [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, SVHN, GTSRB])
def test_missing(module: type[MNIST], tmp_path: Path, offline: list[str]) -> None:
    name = module.__name__
    with pytest.raises(
        FlsuiteError, match=rf"^{name} is not in {tmp_path} \(\S+ is missing\); set data.download"
    ):
        module(root=str(tmp_path), download=False).load()
    assert not offline
    with pytest.raises(
        FlsuiteError, match=rf"^{name} is not in {tmp_path} .*no network in tests.*set data.root"
    ) as caught:
        module(root=str(tmp_path), download=True).load()
    assert offline and "\n" not in str(caught.value)


def write_emnist(
    root: Path, split: str, labels: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Write transposed images, as published, and return the upright ones."""
    raw = root / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    upright = rng.integers(0, 256, (len(labels), 28, 28))
    for part in ("train", "test"):
        (raw / f"emnist-{split}-{part}-images-idx3-ubyte").write_bytes(
            idx(upright.transpose(0, 2, 1))
        )
        (raw / f"emnist-{split}-{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return upright


@pytest.mark.parametrize(
    ("split", "classes"),
    [
        ("byclass", 62),
        ("bymerge", 47),
        ("balanced", 47),
        ("letters", 26),
        ("digits", 10),
        ("mnist", 10),
    ],
)
def test_emnist(
    split: str, classes: int, tmp_path: Path, rng: np.random.Generator, offline: list[str]
) -> None:
    first = 1 if split == "letters" else 0
    upright = write_emnist(tmp_path, split, np.arange(classes) + first, rng)
    source = EMNIST(split, root=str(tmp_path)).load()
    check(source, (1, 28, 28), train=classes, test=classes)
    assert np.array_equal(source.train.x[..., 0].numpy(), upright)
    assert source.train.y.tolist() == list(range(classes))
    assert source.spec.num_classes == classes
    assert source.spec.class_names[0] == ("a" if split == "letters" else "0")
    assert not offline


def test_emnist_unknown_split() -> None:
    from torchvision import datasets

    from flsuite.data.datasets.vision import EMNISTSplit

    assert datasets.EMNIST.splits == get_args(EMNISTSplit)
    with pytest.raises(
        FlsuiteError, match=r"EMNIST: split must be one of byclass, .*, got 'lettres'"
    ):
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


def write_cifar(
    root: Path, name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """Write pickled batches of four images, and set their checksums.

    Returns all images, those of the test batch last, as ``(n, 3, 32, 32)``.
    """
    from torchvision import datasets

    reader = getattr(datasets, name)
    folder, train, test, meta = CIFAR_FILES[name]
    (root / folder).mkdir(parents=True)
    images, sums = [], {}

    def dump(file: str, content: dict[str, Any]) -> None:
        raw = pickle.dumps(content)
        (root / folder / file).write_bytes(raw)
        sums[file] = hashlib.md5(raw).hexdigest()

    for k, file in enumerate([*train, test]):
        images.append(rng.integers(0, 256, (4, 3 * 32 * 32), dtype=np.uint8))
        labels = "labels" if name == "CIFAR10" else "fine_labels"
        dump(file, {"data": images[-1], labels: [k, k + 1, k + 2, k + 3]})
    dump(
        meta, {reader.meta["key"]: [f"class {k}" for k in range(10 if name == "CIFAR10" else 100)]}
    )
    monkeypatch.setattr(reader, "train_list", [[file, sums[file]] for file in train])
    monkeypatch.setattr(reader, "test_list", [[test, sums[test]]])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": sums[meta]})
    return np.concatenate(images).reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("module", [CIFAR10, CIFAR100])
def test_cifar(
    module: type[CIFAR10],
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    offline: list[str],
) -> None:
    images = write_cifar(tmp_path, module.__name__, rng, monkeypatch)
    source = module(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=len(images) - 4, test=4)
    assert np.array_equal(source.train.x.permute(0, 3, 1, 2).numpy(), images[:-4])
    assert np.array_equal(source.test.x.permute(0, 3, 1, 2).numpy(), images[-4:])
    assert source.train.y[:4].tolist() == [0, 1, 2, 3]
    assert source.spec.class_names[3] == "class 3" and not offline


@pytest.mark.parametrize("name", CIFAR_FILES)
def test_cifar_damaged(
    name: str,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    offline: list[str],
) -> None:
    write_cifar(tmp_path, name, rng, monkeypatch)
    folder, _, test, meta = CIFAR_FILES[name]
    for file in (tmp_path / folder / test, tmp_path / folder / meta):
        whole = file.read_bytes()
        file.write_bytes(whole[:-7])
        with pytest.raises(
            FlsuiteError,
            match=rf"files of {name} in .*{folder} are damaged .*corrupted.*delete them",
        ):
            read_torchvision(name, tmp_path, download=True)
        file.write_bytes(whole)
    assert not offline


def test_svhn(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, offline: list[str]
) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    from torchvision import datasets

    images, splits = rng.integers(0, 256, (32, 32, 3, 10), dtype=np.uint8), {}
    for split in ("train", "test"):
        file = tmp_path / f"{split}_32x32.mat"
        scipy_io.savemat(file, {"X": images, "y": np.arange(1, 11, dtype=np.uint8)[:, None]})
        splits[split] = ["http://nowhere", file.name, hashlib.md5(file.read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.SVHN, "split_list", splits)
    source = SVHN(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=10, test=10)
    assert np.array_equal(source.train.x.numpy(), images.transpose(3, 0, 1, 2))
    assert source.train.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert source.spec.class_names[9] == "9"

    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(FlsuiteError, match=rf"files of SVHN in {tmp_path} are damaged"):
        read_torchvision("SVHN", tmp_path, download=True)
    splits["test"][2] = hashlib.md5(file.read_bytes()).hexdigest()
    with pytest.raises(FlsuiteError, match=rf"files of SVHN in {tmp_path} are damaged"):
        read_torchvision("SVHN", tmp_path, download=True)
    assert not offline


def save_image(file: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


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


def test_gtsrb_without_a_class(tmp_path: Path, rng: np.random.Generator) -> None:
    write_gtsrb(tmp_path, rng)
    (folder,) = (tmp_path / "gtsrb" / "GTSRB" / "Training").glob("00005")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(
        FlsuiteError, match=r"GTSRB is not in .*\(gtsrb/GTSRB/Training/00005/ is mis"
    ):
        GTSRB(root=str(tmp_path), download=False).load()


def test_gtsrb_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    write_gtsrb(tmp_path, rng)
    file = tmp_path / "gtsrb" / "GTSRB" / "Training" / "00005" / "00000_00000.ppm"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(FlsuiteError, match=r"files of GTSRB in .*gtsrb are damaged .*delete them"):
        GTSRB(root=str(tmp_path)).load()
    with pytest.raises(FlsuiteError, match="GTSRB: size must be at least 1, got 0"):
        GTSRB(size=0)


# CINIC-10


def write_cinic10(root: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write two images per class and split, the second one in gray. Return all by split."""
    images: dict[str, list[np.ndarray]] = {"train": [], "valid": [], "test": []}
    for split, kept in images.items():
        for name in CLASSES:
            colour = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            grey = rng.integers(0, 256, (32, 32), dtype=np.uint8)
            folder = root / "CINIC-10" / split / name
            save_image(folder / f"cifar10-{split}-1.png", colour)
            save_image(folder / "n02690373_1.png", grey)
            kept += [colour, np.repeat(grey[..., None], 3, axis=2)]
    return {split: np.stack(kept) for split, kept in images.items()}


def test_cinic10(tmp_path: Path, rng: np.random.Generator) -> None:
    images = write_cinic10(tmp_path, rng)
    source = CINIC10(root=str(tmp_path)).load()
    check(source, (3, 32, 32), train=20, val=20, test=20)
    assert source.val is not None and source.spec.class_names == CLASSES
    for split, arrays in (("train", source.train), ("valid", source.val), ("test", source.test)):
        assert np.array_equal(arrays.x.numpy(), images[split])
        assert arrays.y.tolist() == np.repeat(np.arange(10), 2).tolist()


def test_cinic10_uses_of_its_validation_split(tmp_path: Path, rng: np.random.Generator) -> None:
    images = write_cinic10(tmp_path, rng)
    joined = CINIC10(valid="training", root=str(tmp_path)).load()
    assert joined.val is None
    both = np.concatenate([images["train"], images["valid"]])
    assert np.array_equal(joined.train.x.numpy(), both)
    shutil.rmtree(tmp_path / "CINIC-10" / "valid")
    unused = CINIC10(valid="unused", root=str(tmp_path)).load()
    assert unused.val is None and len(unused.train) == 20
    with pytest.raises(FlsuiteError, match="CINIC10: valid must be one of validation, training,"):
        CINIC10(valid="test")  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["valid", "test/ship", "train/airplane"])
def test_cinic10_missing(missing: str, tmp_path: Path, rng: np.random.Generator) -> None:
    write_cinic10(tmp_path, rng)
    shutil.rmtree(tmp_path / "CINIC-10" / missing)
    message = (
        rf"CINIC10 is not in {tmp_path}/CINIC-10 \({missing}\S* is missing\); download "
        r"CINIC-10.tar.gz from https://\S+ and unpack it in CINIC-10 under data.root"
    )
    with pytest.raises(FlsuiteError, match=message):
        CINIC10(root=str(tmp_path)).load()


def test_cinic10_damaged(tmp_path: Path, rng: np.random.Generator) -> None:
    write_cinic10(tmp_path, rng)
    split = tmp_path / "CINIC-10" / "test"
    file = split / "ship" / "n02690373_1.png"
    whole = file.read_bytes()
    for content in (whole[:80], b""):
        file.write_bytes(content)
        with pytest.raises(FlsuiteError, match=rf"images in {split} are damaged .*delete them, do"):
            CINIC10(root=str(tmp_path)).load()
    save_image(file, np.zeros((16, 16, 3), np.uint8))
    with pytest.raises(FlsuiteError, match=r"are damaged \(all input arrays must have the same sh"):
        CINIC10(root=str(tmp_path)).load()
    file.write_bytes(whole)
    save_image(split / "zebra" / "1.png", np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(FlsuiteError, match=r"are damaged \(the classes are airplane, .* zebra\)"):
        CINIC10(root=str(tmp_path)).load()


def test_missing_package(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    def refuse(self: Any) -> None:
        raise ImportError("No module named 'scipy'")

    write_mnist(tmp_path, "MNIST", rng)
    monkeypatch.setattr(datasets.MNIST, "_load_data", refuse)
    with pytest.raises(
        FlsuiteError, match=r"MNIST needs a package that is not installed .No module named 'scipy'"
    ):
        read_torchvision("MNIST", tmp_path, download=False)


# Synthetic


@pytest.mark.parametrize(("classes", "features"), [(2, 1), (3, 2), (5, 30)])
def test_simplex_means(classes: int, features: int) -> None:
    means = simplex_means(classes, features, 2.5, torch_generator(0, "test"))
    assert means.shape == (classes, features)
    distances = torch.pdist(means)
    assert torch.allclose(distances, torch.full_like(distances, 2.5))
    assert torch.allclose(means.sum(0), torch.zeros(features, dtype=torch.float64), atol=1e-12)


def test_bayes_accuracy_closed_forms() -> None:
    for separation in (0.0, 1.0, 3.0):
        expected = 0.5 * (1 + math.erf(separation / 2 / math.sqrt(2)))
        assert bayes_accuracy(2, separation) == pytest.approx(expected, abs=1e-6)
    assert bayes_accuracy(7, 0.0) == pytest.approx(1 / 7, abs=1e-9)
    assert bayes_accuracy(7, 100.0) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("classes", "separation"), [(2, 1.0), (4, 2.0), (10, 3.0)])
def test_the_nearest_mean_reaches_bayes_accuracy(classes: int, separation: float) -> None:
    features, samples = 12, 40000
    source = Synthetic(features, classes, samples, separation, data_seed=3).load()
    means = simplex_means(classes, features, separation, torch_generator(3, "synthetic"))
    whole = DataSplit.concat([source.train, source.test])
    right = (torch.cdist(whole.x.double(), means).argmin(1) == whole.y).double().mean()
    best = bayes_accuracy(classes, separation)
    assert float(right) == pytest.approx(best, abs=4 * (best * (1 - best) / samples) ** 0.5)


def test_synthetic() -> None:
    data = Synthetic(features=6, classes=3, samples=100, separation=2.0)
    source, again, other = data.load(), data.load(), Synthetic(6, 3, 100, 2.0, data_seed=1).load()
    assert (
        source.spec.shape == (6,)
        and source.spec.num_classes == 3
        and source.spec.class_names == ("0", "1", "2")
    )
    assert source.train.x.shape == (80, 6) and source.train.x.dtype == torch.float32
    assert source.test.y.shape == (20,) and source.test.y.dtype == torch.int64
    assert source.train.ids is None and source.val is None
    assert torch.bincount(torch.cat([source.train.y, source.test.y])).tolist() == [34, 33, 33]
    assert torch.equal(source.train.x, again.train.x) and not torch.equal(
        source.train.x, other.train.x
    )
    assert data.bayes_accuracy == bayes_accuracy(3, 2.0)


def test_synthetic_owners() -> None:
    source = Synthetic(5, 2, 5000, 0.0, owners=4, owner_shift=3.0).load()
    plain = Synthetic(5, 2, 5000, 0.0).load()
    assert source.train.ids is not None and source.train.ids.dtype == torch.int64
    assert source.test.ids is not None and set(source.test.ids.tolist()) == {0, 1, 2, 3}
    shifts = source.train.x - plain.train.x
    for owner in range(4):
        own = shifts[source.train.ids == owner]
        assert torch.allclose(own, own[:1].expand_as(own), atol=1e-5), (
            "one shift for all samples of an owner"
        )
    assert torch.pdist(shifts[:4]).min() > 1, "the shifts differ"
    assert torch.equal(source.train.y, plain.train.y), "owners do not change the labels"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 1}, "Synthetic: classes must be at least 2, got 1"),
        (
            {"classes": 5, "features": 3},
            "5 equidistant means need 4 dimensions; raise features, which is 3",
        ),
        ({"samples": 5}, "Synthetic: samples must be at least twice the classes, 8, got 5"),
        ({"separation": -1.0}, "Synthetic: separation must be at least 0, got -1"),
        ({"separation": float("nan")}, "Synthetic: separation must be at least 0, got nan"),
        ({"owners": -1}, "Synthetic: owners must be at least 0, got -1"),
        ({"owners": 81, "samples": 100}, "owners must be at most the 80 training samples, got 81"),
        (
            {"owners": 2, "owner_shift": float("inf")},
            "Synthetic: owner_shift must be at least 0, got inf",
        ),
    ],
)
def test_synthetic_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        Synthetic(**arguments)


# The places of the files


def test_root_argument_before_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    write_mnist(tmp_path / "argument", "MNIST", rng, train=3)
    write_mnist(tmp_path / "environment", "MNIST", rng, train=4)
    monkeypatch.setenv("FLSUITE_DATA_ROOT", str(tmp_path / "environment"))
    assert len(MNIST(root=str(tmp_path / "argument"), download=False).load().train) == 3
    assert len(MNIST(download=False).load().train) == 4


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


# The real files


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


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_real_mnist(name: str) -> None:
    source = read_torchvision(
        name, published(f"{name}/raw/train-images-idx3-ubyte"), download=False
    )
    check(source, (1, 28, 28), train=60000, test=10000)
    assert source.spec.task == "multiclass" and source.spec.num_classes == 10


def test_real_cifar10() -> None:
    source = read_torchvision(
        "CIFAR10", published("cifar-10-batches-py/data_batch_1"), download=False
    )
    check(source, (3, 32, 32), train=50000, test=10000)
    assert torch.bincount(source.train.y).tolist() == [5000] * 10
    assert source.spec.class_names[0] == "airplane"
