"""Datasets as Lightning data modules, and the partitions that split them over clients."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.data.datasets.femnist import FEMNIST
    from flsuite.data.datasets.from_dataset import FromDataModule, FromDataset
    from flsuite.data.datasets.generated import Digits, Synthetic
    from flsuite.data.datasets.medmnist import MedMNIST
    from flsuite.data.datasets.nbaiot import NBaIoT
    from flsuite.data.datasets.table import Table
    from flsuite.data.datasets.vision import (
        CIFAR10,
        CIFAR100,
        CINIC10,
        EMNIST,
        GTSRB,
        MNIST,
        SVHN,
        FashionMNIST,
    )
    from flsuite.data.federated import DataSpec, DataSplit, FederatedData, PublishedSplits
    from flsuite.data.images import Augment, CropFlip
    from flsuite.data.module import FederatedDataModule
    from flsuite.data.partitions.base import Partition
    from flsuite.data.partitions.dirichlet import (
        Dirichlet,
        DirichletBalanced,
        DirichletExtended,
        DirichletProportions,
    )
    from flsuite.data.partitions.from_file import FromFile
    from flsuite.data.partitions.shares import (
        IID,
        Natural,
        Pathological,
        QuantitySkew,
        Ranked,
        SoleOwner,
    )
    from flsuite.data.skews import FeatureSkew, LabelNoise, Skew
    from flsuite.data.tasks import TaskSequence

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CINIC10",
    "EMNIST",
    "FEMNIST",
    "GTSRB",
    "IID",
    "MNIST",
    "SVHN",
    "Augment",
    "CropFlip",
    "DataSpec",
    "DataSplit",
    "Digits",
    "Dirichlet",
    "DirichletBalanced",
    "DirichletExtended",
    "DirichletProportions",
    "FashionMNIST",
    "FeatureSkew",
    "FederatedData",
    "FederatedDataModule",
    "FromDataModule",
    "FromDataset",
    "FromFile",
    "LabelNoise",
    "MedMNIST",
    "NBaIoT",
    "Natural",
    "Partition",
    "Pathological",
    "PublishedSplits",
    "QuantitySkew",
    "Ranked",
    "Skew",
    "SoleOwner",
    "Synthetic",
    "Table",
    "TaskSequence",
]

__getattr__, __dir__ = on_first_use(__name__)
