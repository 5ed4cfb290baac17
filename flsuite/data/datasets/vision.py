"""The usual small image sets, through torchvision's readers: they know file layouts, addresses and checksums.

Sources: LeCun et al., "Gradient-based learning applied to document recognition", 1998 (MNIST); Xiao et al.,
arXiv:1708.07747 (FashionMNIST); Cohen et al., arXiv:1702.05373 (EMNIST); Krizhevsky, "Learning multiple layers of
features from tiny images", 2009 (CIFAR); Netzer et al., "Reading digits in natural images with unsupervised feature
learning", 2011 (SVHN).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.errors import FlsuiteError

__all__ = ["CIFAR10", "CIFAR100", "EMNIST", "MNIST", "SVHN", "FashionMNIST", "read_torchvision"]

DEFAULT_ROOT = "~/.cache/flsuite"
EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")

Unpacked = tuple[Any, Any, "list[str]"]


@dataclass(frozen=True)
class StateLayout:
    """What differs between torchvision's readers.

    Attributes:
        train: The keyword arguments that select the training split.
        test: And the test split.
        files: The files the reader needs, relative to the root, from the reader's class and its options.
        unpack: Images ``(n, height, width, channels)``, labels and class names of a reader.
    """

    train: dict[str, Any]
    test: dict[str, Any]
    files: Callable[..., list[str]]
    unpack: Callable[[Any], Unpacked]


def _idx_files(reader: Any) -> list[str]:
    return [f"{reader.__name__}/raw/{Path(name).stem}" for name, _ in reader.resources]


def _emnist_files(reader: Any, split: str) -> list[str]:
    parts = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    return [f"{reader.__name__}/raw/emnist-{split}-{part}-ubyte" for part in parts]


def _cifar_files(reader: Any) -> list[str]:
    names = [name for name, _ in reader.train_list + reader.test_list]
    return [f"{reader.base_folder}/{name}" for name in [*names, reader.meta["filename"]]]


def _svhn_files(reader: Any) -> list[str]:
    return [reader.split_list[split][1] for split in ("train", "test")]


def _mnist(reader: Any) -> Unpacked:
    return reader.data[..., None], reader.targets, reader.classes


def _emnist(reader: Any) -> Unpacked:
    """The files hold each image transposed; ``letters`` counts its labels from 1, with a name for the missing 0."""
    first = 1 if reader.split == "letters" else 0
    return reader.data.transpose(1, 2)[..., None], reader.targets - first, reader.classes[first:]


def _cifar(reader: Any) -> Unpacked:
    return reader.data, reader.targets, reader.classes


def _svhn(reader: Any) -> Unpacked:
    """Torchvision's images are ``(n, 3, height, width)``; it has mapped the publisher's label 10 to the digit 0."""
    return reader.data.transpose(0, 2, 3, 1), reader.labels, [str(digit) for digit in range(10)]


_FLAG: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})
LAYOUTS = {
    "MNIST": StateLayout(*_FLAG, _idx_files, _mnist),
    "FashionMNIST": StateLayout(*_FLAG, _idx_files, _mnist),
    "EMNIST": StateLayout(*_FLAG, _emnist_files, _emnist),
    "CIFAR10": StateLayout(*_FLAG, _cifar_files, _cifar),
    "CIFAR100": StateLayout(*_FLAG, _cifar_files, _cifar),
    "SVHN": StateLayout({"split": "train"}, {"split": "test"}, _svhn_files, _svhn),
}


def read_torchvision(name: str, root: Path, download: bool, **options: Any) -> PublishedSplits:
    """Read a set from torchvision's layout under ``root``.

    The network is tried only where files are missing and ``download`` is set; the publisher's archives, where they
    lie in torchvision's place for them, are then unpacked instead of fetched.

    Args:
        name: A key of ``LAYOUTS``, which is the name of torchvision's reader.
        root: Torchvision's root folder.
        download: Fetch what is missing.
        **options: Further arguments of torchvision's reader.

    Returns:
        ``train`` and ``test`` with images uint8 ``(n, height, width, channels)`` and labels int64 ``(n,)``; no ``val``.

    Raises:
        FlsuiteError: If files are missing and cannot be fetched, or are damaged.
    """
    import torchvision.datasets

    reader, layout, root = getattr(torchvision.datasets, name), LAYOUTS[name], root.expanduser()
    files = layout.files(reader, **options)
    make = partial(reader, root, **options)
    missing = [file for file in files if not (root / file).is_file()]
    if missing:
        lacking = f"{name} is not in {root} ({missing[0]} is missing)"
        if not download:
            raise FlsuiteError(
                f"{lacking}; set data.download, or data.root to the folder torchvision downloaded it to"
            )
        _fetch(make, layout, lacking)
    try:
        splits = [_arrays(*layout.unpack(make(**split))) for split in (layout.train, layout.test)]
    except ImportError as error:
        raise FlsuiteError(f"{name} needs a package that is not installed ({error})") from error
    except Exception as error:  # pickle, zlib, scipy and torchvision's asserts: any type may come out of a damaged file
        folder = (root / files[0]).parent
        raise FlsuiteError(
            f"the files of {name} in {folder} are damaged ({_line(error)}); delete them and fetch them again"
        ) from error
    (train, names), (test, _) = splits
    height, width, channels = train.x.shape[1:]
    return PublishedSplits(
        DataSpec((channels, height, width), len(names), class_names=names), train, test
    )


def _fetch(make: Callable[..., Any], layout: StateLayout, lacking: str) -> None:
    try:
        for split in (layout.train, layout.test):
            make(download=True, **split)
    except (
        Exception
    ) as error:  # sockets, HTTP, TLS, archives and disks each have their own family of exceptions
        raise FlsuiteError(
            f"{lacking} and could not be downloaded ({_line(error)}); "
            "fetch it with torchvision where there is a network, and set data.root to its root folder"
        ) from error


def _arrays(images: Any, labels: Any, names: list[str]) -> tuple[DataSplit, tuple[str, ...]]:
    x = torch.as_tensor(images).contiguous()
    y = torch.as_tensor(labels, dtype=torch.int64)
    if x.dtype != torch.uint8 or x.ndim != 4:
        raise ValueError(f"the images are {x.dtype} {tuple(x.shape)}")
    if len(x) != len(y) or not len(y):
        raise ValueError(f"there are {len(x)} images and {len(y)} labels")
    if y.min() < 0 or y.max() >= len(names):
        raise ValueError(f"the labels run from {y.min()} to {y.max()} for {len(names)} classes")
    return DataSplit(x, y), tuple(names)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Torchvision(FederatedDataModule):
    """A set of ``LAYOUTS``; looked for in ``root``, by default ``~/.cache/flsuite``."""

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
    """Objects and animals: 50000 training and 10000 test images, 32x32 in colour, 100 (fine) classes."""

    reader = "CIFAR100"


class SVHN(_Torchvision):
    """House numbers: 73257 training and 26032 test images, 32x32 in colour, 10 classes; the extra set is left out."""

    reader = "SVHN"


class EMNIST(_Torchvision):
    """Handwritten letters and digits, 28x28 in grey, upright: the published images are transposed and turned here.

    Args:
        split: ``balanced`` (47 classes), ``byclass`` (62), ``bymerge`` (47), ``letters`` (26, counted from 0),
            ``digits`` or ``mnist`` (10 each).
        **kwargs: Those of ``FederatedDataModule``.
    """

    reader = "EMNIST"

    def __init__(self, split: str = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if split not in EMNIST_SPLITS:
            raise FlsuiteError(
                f"EMNIST has no split {split!r}; data.split must be one of {', '.join(EMNIST_SPLITS)}"
            )
        self.split = split

    def load(self) -> PublishedSplits:
        return read_torchvision(
            self.reader, self.data_root(DEFAULT_ROOT), self.download, split=self.split
        )
