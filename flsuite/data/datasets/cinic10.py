"""CINIC-10: CIFAR-10 extended with images of ImageNet.

Source: Darlow et al., "CINIC-10 is not ImageNet or CIFAR-10", arXiv:1810.03505.
"""

from pathlib import Path
from typing import Any, Literal

import torch

from flsuite.common.arguments import check_init
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.data.datasets.vision import split_of, stacked
from flsuite.data.module import FederatedDataModule
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits

_FOLDER = "CINIC-10"
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
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
        for name in names:
            _check_folders(folder / name)

        splits = {name: _read(folder / name) for name in names}
        train, test, valid = splits["train"], splits["test"], splits.get("valid")
        if valid is not None and self.valid == "training":
            train.x, train.y = torch.cat([train.x, valid.x]), torch.cat([train.y, valid.y])
            valid = None
        spec = DataSpec((3, _SIDE, _SIDE), len(CLASSES), class_names=CLASSES)
        return PublishedSplits(spec, train, test, valid)


def _check_folders(split: Path) -> None:
    """Refuse a split with a missing class folder, because its labels would be wrong."""
    missing = [split / name for name in CLASSES if not (split / name).is_dir()]
    if missing:
        raise FlsuiteError(
            f"CINIC10 is not in {split.parent} ({missing[0].relative_to(split.parent)} is missing);"
            f" {_REMEDY} under data.root"
        )


def _read(split: Path) -> DataSplit:
    """Return the images of a split, by class and then by file name."""
    from torchvision.datasets import ImageFolder

    try:
        reader = ImageFolder(str(split))
        if tuple(reader.classes) != CLASSES:
            raise ValueError(f"the classes are {', '.join(reader.classes)}")
        arrays, _ = split_of(stacked(image for image, _ in reader), reader.targets, reader.classes)
        if arrays.x.shape[1:3] != (_SIDE, _SIDE):
            raise ValueError(f"the images have {arrays.x.shape[1]} x {arrays.x.shape[2]} pixels")
        return arrays
    except Exception as error:  # a damaged image may raise any type
        raise FlsuiteError(
            f"the images in {split} are damaged ({one_line(error)}); delete them, {_REMEDY} again"
        ) from error
