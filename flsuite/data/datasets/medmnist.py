"""MedMNIST v2 and MedMNIST+: twelve sets of small medical images, and six sets of volumes.

Names, checksums, URLs and the download come from the ``medmnist`` package. The file is read here,
directly into tensors, because the package creates a PIL image per sample.

Source: Yang et al., "MedMNIST v2: A large-scale lightweight benchmark for 2D and 3D biomedical
image classification", Scientific Data 10, 2023.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from flsuite.common.arguments import check_init
from flsuite.common.errors import FlsuiteError, refused_as, require_one_of
from flsuite.data.federated import DataSpec, DataSplit, PublishedSplits, Task
from flsuite.data.module import FederatedDataModule

_DEFAULT_ROOT = "~/.medmnist"
_SPLITS = ("train", "val", "test")
_TASKS: dict[str, Task] = {
    "multi-class": "multiclass",
    "binary-class": "binary",
    "ordinal-regression": "ordinal",
    "multi-label, binary-class": "multilabel",
}


def _info(name: str) -> dict[str, Any]:
    """Return the entry of a set in the package."""
    from medmnist import INFO

    require_one_of("MedMNIST", INFO, name=name)
    info: dict[str, Any] = INFO[name]
    return info


def _spec(info: dict[str, Any], size: int) -> DataSpec:
    names = tuple(info["label"][str(k)] for k in range(len(info["label"])))
    sides = [size] * (3 if info["python_class"].endswith("3D") else 2)
    return DataSpec((info["n_channels"], *sides), len(names), _TASKS[info["task"]], names)


def _download(file: Path, url: str, md5: str) -> None:
    """Download a file to a temporary folder next to its destination, then move it there.

    An interrupted download leaves no partial file under the final name.
    """
    from torchvision.datasets.utils import download_url

    what = f"{file.name} is not in {file.parent} and could not be downloaded"
    with refused_as(what, f"put {url} there by hand"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".download-") as folder:
            download_url(url, root=folder, filename=file.name, md5=md5)
            os.replace(Path(folder) / file.name, file)


def _read(file: Path, spec: DataSpec, md5: str | None = None) -> list[DataSplit]:
    """Return the splits of a file, after checking that it is the published one."""
    from torchvision.datasets.utils import calculate_md5

    with refused_as(f"{file} cannot be read", "check the file and its permissions"):
        actual = calculate_md5(file)
    what = f"{file} is damaged or not the published file"
    with refused_as(what, "delete it and download it again"):
        # Nothing else would detect damaged pixels.
        if md5 is not None and actual != md5:
            raise ValueError(f"its MD5 is {actual}, the published one {md5}")
        with np.load(file, allow_pickle=False) as arrays:
            return [_split(arrays[f"{s}_images"], arrays[f"{s}_labels"], s, spec) for s in _SPLITS]


def _split(images: np.ndarray, labels: np.ndarray, split: str, spec: DataSpec) -> DataSplit:
    """Return images ``(n, h, w[, c])`` and labels ``(n, 1 or labels)`` of the file as a split.

    Volumes are ``(n, d, h, w)``.
    """
    channels, *sides = spec.shape
    multilabel = spec.task == "multilabel"
    columns, values = (spec.num_classes, 2) if multilabel else (1, spec.num_classes)
    # Gray images are stored without a channel.
    if images.ndim == 1 + len(sides):
        images = images[..., None]

    if images.dtype != np.uint8 or images.shape[1:] != (*sides, channels):
        raise ValueError(f"{split}_images are {images.dtype} {images.shape}")
    if labels.shape != (len(images), columns) or not len(labels):
        raise ValueError(f"{split}_labels have shape {labels.shape} for {len(images)} images")
    if labels.min() < 0 or labels.max() >= values:
        raise ValueError(f"{split}_labels are outside the classes")

    y = labels.astype(np.uint8) if multilabel else labels[:, 0].astype(np.int64)
    return DataSplit(torch.from_numpy(images), torch.from_numpy(y))


class MedMNIST(FederatedDataModule):
    """One of the 18 MedMNIST sets in its published training, validation and test splits.

    The files are in ``root``, by default in the folder of the ``medmnist`` package,
    ``~/.medmnist``.

    Args:
        name: ``pathmnist``, ``chestmnist`` (14 labels), ``dermamnist``, ``octmnist``,
            ``pneumoniamnist``, ``retinamnist`` (ordinal), ``breastmnist``, ``bloodmnist``,
            ``tissuemnist``, ``organamnist``, ``organcmnist`` or ``organsmnist``. Volumes:
            ``organmnist3d``, ``nodulemnist3d``, ``adrenalmnist3d``, ``fracturemnist3d``,
            ``vesselmnist3d`` or ``synapsemnist3d``.
        size: Side of the images in pixels: 28, 64, 128 or 224, of volumes 28 or 64. Each size has
            its own file, not a resized 28.
        **kwargs: Arguments of ``FederatedDataModule``.
    """

    def __init__(self, name: str, size: Literal[28, 64, 128, 224] = 28, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name: str = name
        self.size = size
        check_init(self, MedMNIST)

    def load(self) -> PublishedSplits:
        """Read the published set, with its validation split.

        An existing file is never replaced. The labels of ChestMNIST are uint8 ``(n, 14)``.
        """
        info = _info(self.name)
        # The package names keys and files of the original size without a suffix.
        suffix = "" if self.size == 28 else f"_{self.size}"
        file = self.data_root(_DEFAULT_ROOT) / f"{self.name}{suffix}.npz"
        if f"url{suffix}" not in info:
            raise FlsuiteError(f"MedMNIST: size of {self.name} must be 28 or 64, got {self.size}")
        url, md5 = info[f"url{suffix}"], info[f"MD5{suffix}"]

        if not file.is_file():
            if not self.download:
                raise FlsuiteError(
                    f"{file.name} is not in {file.parent}, and nothing is downloaded; set "
                    f"data.download, put {url} there, or set data.root or FLSUITE_DATA_ROOT"
                )
            _download(file, url, md5)
        spec = _spec(info, self.size)
        train, val, test = _read(file, spec, md5)
        return PublishedSplits(spec, train, test, val)
