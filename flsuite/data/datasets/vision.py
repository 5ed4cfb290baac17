"""The usual small image sets.

Sources: LeCun et al., "Gradient-based learning applied to document recognition", 1998 (MNIST); Xiao
et al., arXiv:1708.07747 (FashionMNIST); Cohen et al., arXiv:1702.05373 (EMNIST); Krizhevsky,
"Learning multiple layers of features from tiny images", 2009 (CIFAR); Netzer et al., "Reading
digits in natural images with unsupervised feature learning", 2011 (SVHN); Stallkamp et al., "The
German Traffic Sign Recognition Benchmark: a multi-class classification competition", 2011 (GTSRB).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from flsuite.arguments import PositiveInt, check_init
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError, one_line

Unpacked = tuple[Any, Any, "list[str]"]
"""Images ``(n, height, width, channels)``, labels, class names."""

_SIGNS = 43
"""Classes of GTSRB."""


@dataclass(frozen=True)
class Reader:
    """The differences between torchvision's readers.

    Attributes:
        train: The keyword arguments that select the training split.
        test: The keyword arguments that select the test split.
        files: Returns the files that the reader needs, relative to the root, from the reader's
            class and options. A name that ends with a slash is a folder.
        unpack: Returns the content of a reader.
    """

    train: dict[str, Any]
    test: dict[str, Any]
    files: Callable[..., list[str]]
    unpack: Callable[[Any], Unpacked]


def read_torchvision(name: str, root: Path, download: bool, **options: Any) -> PublishedSplits:
    """Read a set from torchvision's layout under ``root``.

    The network is used only where files are missing and ``download`` is set. Archives of the
    publisher that are in torchvision's place for them are then unpacked instead of downloaded.

    Args:
        name: A key of ``READERS``, which is the name of torchvision's reader.
        root: Torchvision's root folder.
        download: Download missing files.
        **options: Further arguments of torchvision's reader.

    Returns:
        ``train`` and ``test`` with images uint8 ``(n, height, width, channels)`` and labels int64
        ``(n,)``. There is no ``val``.

    Raises:
        FlsuiteError: If files are missing and cannot be downloaded, or are damaged.
    """
    import torchvision.datasets

    cls, reader, root = getattr(torchvision.datasets, name), READERS[name], root.expanduser()
    files = reader.files(cls, **options)
    make = partial(cls, root, **options)

    # Checked here, so that existing files are read without a network for any value of download.
    missing = [file for file in files if not _is_there(root, file)]
    if missing:
        what = f"{name} is not in {root} ({missing[0]} is missing)"
        if not download:
            raise FlsuiteError(
                f"{what}; set data.download, or data.root to torchvision's root folder"
            )
        _download(make, reader, what)

    try:
        splits = [split_of(*reader.unpack(make(**split))) for split in (reader.train, reader.test)]
    except ImportError as error:
        raise FlsuiteError(f"{name} needs a package that is not installed ({error})") from error
    except Exception as error:  # a damaged file may raise any type: pickle, zlib, scipy, asserts
        folder = (root / files[0]).parent
        raise FlsuiteError(
            f"the files of {name} in {folder} are damaged ({one_line(error)}); "
            "delete them and download them again"
        ) from error

    (train, names), (test, _) = splits
    height, width, channels = train.x.shape[1:]
    spec = DataSpec((channels, height, width), len(names), class_names=names)
    return PublishedSplits(spec, train, test)


def _download(make: Callable[..., Any], reader: Reader, what: str) -> None:
    """Download both splits.

    ``what`` says what is missing.
    """
    try:
        for split in (reader.train, reader.test):
            make(download=True, **split)
    except Exception as error:  # sockets, TLS, archives and disks have their own exceptions each
        raise FlsuiteError(
            f"{what} and could not be downloaded ({one_line(error)}); download it with torchvision "
            "where there is a network, and set data.root to its root folder"
        ) from error


def split_of(images: Any, labels: Any, names: list[str]) -> tuple[DataSplit, tuple[str, ...]]:
    """Return a reader's content as a checked split, and the class names.

    Raises:
        ValueError: If images and labels do not fit each other or the names.
    """
    x = torch.as_tensor(images).contiguous()
    y = torch.as_tensor(labels, dtype=torch.int64)
    if x.dtype != torch.uint8 or x.ndim != 4:
        raise ValueError(f"the images are {x.dtype} {tuple(x.shape)}")
    if len(x) != len(y) or not len(y):
        raise ValueError(f"there are {len(x)} images and {len(y)} labels")
    if y.min() < 0 or y.max() >= len(names):
        raise ValueError(f"the labels run from {y.min()} to {y.max()} for {len(names)} classes")
    return DataSplit(x, y), tuple(names)


def stacked(images: Iterable[Any]) -> np.ndarray:
    """Return images in colour and of one size as one array uint8 ``(n, height, width, 3)``.

    Args:
        images: Images of PIL.

    Raises:
        ValueError: If two of them have different sizes.
    """
    return np.stack([np.asarray(image.convert("RGB")) for image in images])


def _is_there(root: Path, name: str) -> bool:
    """Return whether a file is under the root, or a folder if the name ends with a slash."""
    return (root / name).is_dir() if name.endswith("/") else (root / name).is_file()


def _idx_files(cls: Any) -> list[str]:
    return [f"{cls.__name__}/raw/{Path(name).stem}" for name, _ in cls.resources]


def _emnist_files(cls: Any, split: str) -> list[str]:
    parts = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    return [f"{cls.__name__}/raw/emnist-{split}-{part}-ubyte" for part in parts]


def _cifar_files(cls: Any) -> list[str]:
    names = [name for name, _ in cls.train_list + cls.test_list]
    return [f"{cls.base_folder}/{name}" for name in [*names, cls.meta["filename"]]]


def _svhn_files(cls: Any) -> list[str]:
    return [cls.split_list[split][1] for split in ("train", "test")]


def _gtsrb_files(cls: Any, transform: Any) -> list[str]:
    # All classes: torchvision numbers the folders that exist, from 0 without gaps.
    folders = [f"gtsrb/GTSRB/Training/{label:05d}/" for label in range(_SIGNS)]
    return ["gtsrb/GT-final_test.csv", "gtsrb/GTSRB/Final_Test/Images/", *folders]


def _mnist(reader: Any) -> Unpacked:
    return reader.data[..., None], reader.targets, reader.classes


def _emnist(reader: Any) -> Unpacked:
    """Unpack EMNIST, whose images are stored transposed.

    ``letters`` counts its labels from 1, and has a name for the missing 0.
    """
    first = 1 if reader.split == "letters" else 0
    return reader.data.transpose(1, 2)[..., None], reader.targets - first, reader.classes[first:]


def _cifar(reader: Any) -> Unpacked:
    return reader.data, reader.targets, reader.classes


def _svhn(reader: Any) -> Unpacked:
    """Unpack SVHN, whose images are ``(n, 3, height, width)``.

    Torchvision has already mapped the publisher's label 10 to the digit 0.
    """
    return reader.data.transpose(0, 2, 3, 1), reader.labels, [str(digit) for digit in range(10)]


def _gtsrb(reader: Any) -> Unpacked:
    """Unpack GTSRB, whose reader gives images of one size with the option ``transform``."""
    images, labels = zip(*(reader[row] for row in range(len(reader))), strict=True)
    return stacked(images), labels, [str(sign) for sign in range(_SIGNS)]


_FLAG: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})
_SPLIT: tuple[dict[str, Any], dict[str, Any]] = ({"split": "train"}, {"split": "test"})
READERS = {
    "MNIST": Reader(*_FLAG, _idx_files, _mnist),
    "FashionMNIST": Reader(*_FLAG, _idx_files, _mnist),
    "EMNIST": Reader(*_FLAG, _emnist_files, _emnist),
    "CIFAR10": Reader(*_FLAG, _cifar_files, _cifar),
    "CIFAR100": Reader(*_FLAG, _cifar_files, _cifar),
    "SVHN": Reader(*_SPLIT, _svhn_files, _svhn),
    "GTSRB": Reader(*_SPLIT, _gtsrb_files, _gtsrb),
}


DEFAULT_ROOT = "~/.cache/flsuite"

EMNISTSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


class _Torchvision(FederatedDataModule):
    """A set that torchvision reads, in ``root`` or by default in ``~/.cache/flsuite``."""

    reader: ClassVar[str]

    def load(self) -> PublishedSplits:
        return read_torchvision(self.reader, self.data_root(DEFAULT_ROOT), self.download)


class MNIST(_Torchvision):
    """Handwritten digits: 60000 training and 10000 test images, 28x28 in grey, 10 classes."""

    reader = "MNIST"


class FashionMNIST(_Torchvision):
    """Articles of clothing: 60000 training and 10000 test images, 28x28 in grey, 10 classes."""

    reader = "FashionMNIST"


class CIFAR10(_Torchvision):
    """Objects and animals: 50000 training and 10000 test images, 32x32 in colour, 10 classes."""

    reader = "CIFAR10"


class CIFAR100(_Torchvision):
    """Objects and animals: 50000 training and 10000 test images, 32x32 in colour, 100 classes."""

    reader = "CIFAR100"


class SVHN(_Torchvision):
    """House numbers: 73257 training and 26032 test images, 32x32 in colour, 10 classes.

    The extra training images are left out.
    """

    reader = "SVHN"


class EMNIST(_Torchvision):
    """Handwritten letters and digits, 28x28 in grey, upright (the published images are transposed).

    Args:
        split: ``balanced`` (47 classes), ``byclass`` (62), ``bymerge`` (47), ``letters`` (26,
            counted from 0), ``digits`` or ``mnist`` (10 each).
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    reader = "EMNIST"

    def __init__(self, split: EMNISTSplit = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.split = split
        check_init(self, EMNIST)

    def load(self) -> PublishedSplits:
        root = self.data_root(DEFAULT_ROOT)
        return read_torchvision(self.reader, root, self.download, split=self.split)


class GTSRB(_Torchvision):
    """German traffic signs: 26640 training and 12630 test images in colour, 43 classes.

    The published images have sides from 15 to 250 pixels, and show the sign with a margin. Each is
    resized bilinearly while it is read, to a square whatever its shape.

    Args:
        size: Side in pixels of all images. The default is that of FedFisher.
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    reader = "GTSRB"

    def __init__(self, size: PositiveInt = 32, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size
        check_init(self, GTSRB)

    def load(self) -> PublishedSplits:
        root = self.data_root(DEFAULT_ROOT)
        resize = partial(_resized, size=self.size)
        return read_torchvision(self.reader, root, self.download, transform=resize)


def _resized(image: Any, size: int) -> Any:
    """Return an image of PIL in another size."""
    from PIL.Image import Resampling

    # PIL averages over all pixels where it shrinks, as resize_images does.
    return image.resize((size, size), Resampling.BILINEAR)
