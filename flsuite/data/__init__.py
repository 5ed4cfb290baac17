"""Datasets as Lightning data modules, and the partitions that deal them to clients."""

from flsuite.data.augment import Augment, CropFlip
from flsuite.data.digits import Digits
from flsuite.data.federated import FederatedData
from flsuite.data.femnist import FEMNIST
from flsuite.data.medmnist import MedMNIST
from flsuite.data.module import FederatedDataModule
from flsuite.data.nbaiot import NBaIoT
from flsuite.data.partitions import (
    IID,
    Dirichlet,
    DirichletBalanced,
    Natural,
    Partition,
    Pathological,
    QuantitySkew,
)
from flsuite.data.source import Arrays, DataSpec, Source
from flsuite.data.synthetic import Synthetic
from flsuite.data.table import Table
from flsuite.data.tasks import TaskSequence
from flsuite.data.vision import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "FEMNIST",
    "IID",
    "MNIST",
    "SVHN",
    "Arrays",
    "Augment",
    "CropFlip",
    "DataSpec",
    "Digits",
    "Dirichlet",
    "DirichletBalanced",
    "FashionMNIST",
    "FederatedData",
    "FederatedDataModule",
    "MedMNIST",
    "NBaIoT",
    "Natural",
    "Partition",
    "Pathological",
    "QuantitySkew",
    "Source",
    "Synthetic",
    "Table",
    "TaskSequence",
]
