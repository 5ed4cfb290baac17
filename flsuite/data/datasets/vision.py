"""Image datasets of torchvision, and CINIC-10.

Sources: LeCun et al., "Gradient-based learning applied to document recognition", 1998 (MNIST); Xiao
et al., arXiv:1708.07747 (FashionMNIST); Cohen et al., arXiv:1702.05373 (EMNIST); Krizhevsky,
"Learning multiple layers of features from tiny images", 2009 (CIFAR); Netzer et al., "Reading
digits in natural images with unsupervised feature learning", 2011 (SVHN); Stallkamp et al., "The
German Traffic Sign Recognition Benchmark: a multi-class classification competition", 2011 (GTSRB).

Source: Darlow et al., "CINIC-10 is not ImageNet or CIFAR-10", arXiv:1810.03505.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from flsuite.common.arguments import PositiveInt, check_init
from flsuite.common.errors import FlsuiteError, refused_as
from flsuite.common.files import locked
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits
from flsuite.data.module import FederatedDataModule

_Unpacked = tuple[Any, Any, "list[str]"]
"""Images ``(n, height, width, channels)``, labels, class names."""

_Selections = tuple[dict[str, Any], dict[str, Any]]

EMNISTSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]

_SIGNS = 43  # classes of GTSRB
_DOWNLOAD = 6 * 3600.0  # maximum seconds to wait for the download of another process


def _download(make: Callable[..., Any], splits: _Selections, what: str) -> None:
    """Download the splits.

    ``what`` names the missing file, for the message.
    """
    remedy = (
        "download it with torchvision where there is a network, and set data.root, or "
        "FLSUITE_DATA_ROOT for all sets, to its root folder"
    )
    with refused_as(f"{what} and could not be downloaded", remedy):
        for split in splits:
            make(download=True, **split)


def _split_of(images: Any, labels: Any, names: list[str]) -> tuple[DataSplit, tuple[str, ...]]:
    """Return a reader's content as a validated split, and the class names.

    Raises:
        ValueError: If images, labels and names are inconsistent.
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
    """Return color images of one size as one array uint8 ``(n, height, width, 3)``.

    Args:
        images: PIL images.

    Raises:
        ValueError: If two of them have different sizes.
    """
    return np.stack([np.asarray(image.convert("RGB")) for image in images])


@contextmanager
def _no_other_download(root: Path, makes: bool) -> Iterator[None]:
    """Wait for another process that downloads or unpacks files in a folder, and keep others out.

    Several processes may start with an empty folder. There is no lock in a folder that is missing
    or cannot be read, nor on a disk without locks.

    Args:
        root: The folder.
        makes: Whether to make it.
    """
    if makes:
        with suppress(OSError):  # the download says why
            root.mkdir(parents=True, exist_ok=True)
    has_lock = root.is_dir() and os.access(root, os.R_OK)
    with locked(root, wait=_DOWNLOAD) if has_lock else nullcontext():
        yield


class _Torchvision(FederatedDataModule):
    """A dataset that torchvision reads, in ``root`` or by default in ``~/.cache/flsuite``.

    Its class, or a base class, has the name of torchvision's reader.

    Attributes:
        selections: The arguments of the reader that select the training and the test split.
    """

    selections: ClassVar[_Selections] = ({"train": True}, {"train": False})

    def load(self) -> PublishedSplits:
        """Read the set from torchvision's layout.

        The network is used only if files are missing and ``download`` is set. If the publisher's
        archives are in torchvision's location, they are unpacked instead of downloaded.
        """
        import torchvision.datasets

        readers, root = vars(torchvision.datasets), self.data_root()
        name = next(kind.__name__ for kind in type(self).__mro__ if kind.__name__ in readers)
        cls = readers[name]
        files, make = self._files(cls), partial(cls, root, **self._options())

        with _no_other_download(root, self.download):
            # Checked here, so existing files are read without network access for any ``download``.
            missing = [file for file in files if not (root / file).exists()]
            if missing:
                what = f"{name} is not in {root} ({missing[0]} is missing)"
                if not self.download:
                    raise FlsuiteError(
                        f"{what}, and nothing is downloaded; set data.download, or data.root or "
                        "FLSUITE_DATA_ROOT to torchvision's root folder"
                    )
                _download(make, self.selections, what)

        what = f"the files of {name} in {(root / files[0]).parent} are damaged"
        with refused_as(what, "delete them and download them again"):
            try:
                splits = [_split_of(*self._unpack(make(**split))) for split in self.selections]
            except ImportError as error:
                raise FlsuiteError(
                    f"{name} needs a package that is not installed ({error})"
                ) from error

        (train, names), (test, _) = splits
        height, width, channels = train.x.shape[1:]
        spec = DataSpec((channels, height, width), len(names), class_names=names)
        return PublishedSplits(spec, train, test)

    def _options(self) -> dict[str, Any]:
        """Return further arguments of the reader."""
        return {}

    def _files(self, cls: Any) -> list[str]:
        """Return the files and folders that a reader's class needs, relative to the root."""
        return [f"{cls.__name__}/raw/{Path(name).stem}" for name, _ in cls.resources]

    def _unpack(self, reader: Any) -> _Unpacked:
        """Return the content of a reader. Gray images may have no channel."""
        images = torch.as_tensor(reader.data)
        return images if images.ndim == 4 else images[..., None], reader.targets, reader.classes


class MNIST(_Torchvision):
    """Handwritten digits: 60000 training and 10000 test images, 28x28 gray, 10 classes."""


class FashionMNIST(_Torchvision):
    """Articles of clothing: 60000 training and 10000 test images, 28x28 gray, 10 classes."""


class CIFAR10(_Torchvision):
    """Objects and animals: 50000 training and 10000 test images, 32x32 in color, 10 classes."""

    def _files(self, cls: Any) -> list[str]:
        names = [name for name, _ in cls.train_list + cls.test_list]
        return [f"{cls.base_folder}/{name}" for name in [*names, cls.meta["filename"]]]


class CIFAR100(CIFAR10):
    """Objects and animals: 50000 training and 10000 test images, 32x32 in color, 100 classes."""


class SVHN(_Torchvision):
    """House numbers: 73257 training and 26032 test images, 32x32 in color, 10 classes.

    The extra training images are not used.
    """

    selections = ({"split": "train"}, {"split": "test"})

    def _files(self, cls: Any) -> list[str]:
        return [cls.split_list[split][1] for split in ("train", "test")]

    def _unpack(self, reader: Any) -> _Unpacked:
        # From (n, 3, height, width). Torchvision maps the published label 10 to the digit 0.
        return reader.data.transpose(0, 2, 3, 1), reader.labels, [str(digit) for digit in range(10)]


class EMNIST(_Torchvision):
    """Handwritten letters and digits, 28x28 gray, upright (the published images are transposed).

    Args:
        split: ``balanced`` (47 classes), ``byclass`` (62), ``bymerge`` (47), ``letters`` (26,
            counted from 0), ``digits`` or ``mnist`` (10 each).
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    def __init__(self, split: EMNISTSplit = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.split = split
        check_init(self, EMNIST)

    def _options(self) -> dict[str, Any]:
        return {"split": self.split}

    def _files(self, cls: Any) -> list[str]:
        files = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
        return [f"EMNIST/raw/emnist-{self.split}-{file}-ubyte" for file in files]

    def _unpack(self, reader: Any) -> _Unpacked:
        # The letters split counts its labels from 1, and has a name for the missing 0.
        first = 1 if self.split == "letters" else 0
        images = reader.data.transpose(1, 2)[..., None]
        return images, reader.targets - first, reader.classes[first:]


class GTSRB(_Torchvision):
    """German traffic signs: 26640 training and 12630 test images in color, 43 classes.

    The published images have sides from 15 to 250 pixels, and show the sign with a margin. Each is
    resized bilinearly on reading, to a square regardless of its shape.

    Args:
        size: Side in pixels of all images. The default is the one of FedFisher.
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    selections = ({"split": "train"}, {"split": "test"})

    def __init__(self, size: PositiveInt = 32, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size
        check_init(self, GTSRB)

    def _options(self) -> dict[str, Any]:
        return {"transform": self._of_size}

    def _of_size(self, image: Any) -> Any:
        """Return a PIL image resized to the common size."""
        from PIL.Image import Resampling

        # PIL averages over all pixels when it shrinks, like resize_images.
        return image.resize((self.size, self.size), Resampling.BILINEAR)

    def _files(self, cls: Any) -> list[str]:
        # All class folders, because torchvision numbers the existing ones without gaps.
        folders = [f"gtsrb/GTSRB/Training/{label:05d}/" for label in range(_SIGNS)]
        return ["gtsrb/GT-final_test.csv", "gtsrb/GTSRB/Final_Test/Images/", *folders]

    def _unpack(self, reader: Any) -> _Unpacked:
        images, labels = zip(*(reader[row] for row in range(len(reader))), strict=True)
        return stacked(images), labels, [str(sign) for sign in range(_SIGNS)]


_FOLDER = "CINIC-10"
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_SIDE = 32
_REMEDY = (
    f"download CINIC-10.tar.gz from https://doi.org/10.7488/ds/2448 and unpack it in {_FOLDER}"
)

_Valid = Literal["validation", "training", "unused"]


class CINIC10(FederatedDataModule):
    """Objects and animals: 90000 training and 90000 test images, 32x32 in color, 10 classes.

    A published validation split of 90000 images is included. The files are the publisher's folders
    ``train``, ``valid`` and ``test`` in ``CINIC-10`` under ``root``, by default under
    ``~/.cache/flsuite``. They are not downloaded. Reading a split takes about ten seconds.

    All images of CIFAR-10 are in CINIC-10, spread over its three splits. A model trained on
    CIFAR-10 has therefore seen test images of CINIC-10.

    Args:
        valid: The use of the published validation split: ``validation``, ``training`` (it joins the
            training split), or ``unused``.
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    def __init__(self, valid: _Valid = "validation", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.valid: _Valid = valid
        check_init(self, CINIC10)

    def load(self) -> PublishedSplits:
        folder = self.data_root() / _FOLDER
        names = ("train", "test") if self.valid == "unused" else ("train", "test", "valid")
        # A missing class folder would make the labels wrong.
        places = [f"{split}/{name}" for split in names for name in CLASSES]
        if missing := [place for place in places if not (folder / place).is_dir()]:
            raise FlsuiteError(
                f"CINIC10 is not in {folder} ({missing[0]} is missing); {_REMEDY} under data.root "
                "or FLSUITE_DATA_ROOT"
            )

        splits = {name: _read(folder / name) for name in names}
        train, test, valid = splits["train"], splits["test"], splits.get("valid")
        if valid is not None and self.valid == "training":
            train.x, train.y = torch.cat([train.x, valid.x]), torch.cat([train.y, valid.y])
            valid = None
        spec = DataSpec((3, _SIDE, _SIDE), len(CLASSES), class_names=CLASSES)
        return PublishedSplits(spec, train, test, valid)


def _read(split: Path) -> DataSplit:
    """Return the images of a split, by class and then by file name."""
    from torchvision.datasets import ImageFolder

    with refused_as(f"the images in {split} are damaged", f"delete them, {_REMEDY} again"):
        reader = ImageFolder(str(split))
        if tuple(reader.classes) != CLASSES:
            raise ValueError(f"the classes are {', '.join(reader.classes)}")
        arrays, _ = _split_of(stacked(image for image, _ in reader), reader.targets, reader.classes)
        if arrays.x.shape[1:3] != (_SIDE, _SIDE):
            raise ValueError(f"the images have {arrays.x.shape[1]} x {arrays.x.shape[2]} pixels")
    return arrays
