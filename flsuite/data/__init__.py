"""Datasets as Lightning data modules, and the partitions that split them over clients."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.data.datasets.cinic10 import CINIC10
    from flsuite.data.datasets.digits import Digits
    from flsuite.data.datasets.femnist import FEMNIST
    from flsuite.data.datasets.from_data_module import FromDataModule
    from flsuite.data.datasets.from_dataset import FromDataset
    from flsuite.data.datasets.medmnist import MedMNIST
    from flsuite.data.datasets.nbaiot import NBaIoT
    from flsuite.data.datasets.synthetic import Synthetic
    from flsuite.data.datasets.table import Table
    from flsuite.data.datasets.vision import (
        CIFAR10,
        CIFAR100,
        EMNIST,
        GTSRB,
        MNIST,
        SVHN,
        FashionMNIST,
    )
    from flsuite.data.federated import FederatedData
    from flsuite.data.images import Augment, CropFlip
    from flsuite.data.module import FederatedDataModule
    from flsuite.data.partitions.base import Partition
    from flsuite.data.partitions.dirichlet import Dirichlet
    from flsuite.data.partitions.dirichlet_balanced import DirichletBalanced
    from flsuite.data.partitions.dirichlet_extended import DirichletExtended
    from flsuite.data.partitions.dirichlet_proportions import DirichletProportions
    from flsuite.data.partitions.iid import IID
    from flsuite.data.partitions.natural import Natural
    from flsuite.data.partitions.pathological import Pathological
    from flsuite.data.partitions.quantity import QuantitySkew
    from flsuite.data.partitions.ranked import Ranked
    from flsuite.data.partitions.sole_owner import SoleOwner
    from flsuite.data.skews import FeatureSkew, LabelNoise, Skew
    from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
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

__getattr__ = on_first_use(__name__, __file__)
