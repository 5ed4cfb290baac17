"""The usual small image sets.

Sources: LeCun et al., "Gradient-based learning applied to document recognition", 1998 (MNIST); Xiao
et al., arXiv:1708.07747 (FashionMNIST); Cohen et al., arXiv:1702.05373 (EMNIST); Krizhevsky,
"Learning multiple layers of features from tiny images", 2009 (CIFAR); Netzer et al., "Reading
digits in natural images with unsupervised feature learning", 2011 (SVHN); Stallkamp et al., "The
German Traffic Sign Recognition Benchmark: a multi-class classification competition", 2011 (GTSRB).
"""

from functools import partial
from typing import Any, ClassVar, Literal

from flsuite.arguments import PositiveInt, check_init
from flsuite.data.datasets.torchvision_files import read_torchvision
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import PublishedSplits

__all__ = ["CIFAR10", "CIFAR100", "EMNIST", "GTSRB", "MNIST", "SVHN", "FashionMNIST"]

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
