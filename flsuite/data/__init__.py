"""Datasets as Lightning data modules, and the partitions that split them over clients."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.data.datasets.femnist import FEMNIST as FEMNIST
    from flsuite.data.datasets.from_dataset import (
        FromDataModule as FromDataModule,
        FromDataset as FromDataset,
    )
    from flsuite.data.datasets.generated import Digits as Digits, Synthetic as Synthetic
    from flsuite.data.datasets.medmnist import MedMNIST as MedMNIST
    from flsuite.data.datasets.nbaiot import NBaIoT as NBaIoT
    from flsuite.data.datasets.table import Table as Table
    from flsuite.data.datasets.vision import (
        CIFAR10 as CIFAR10,
        CIFAR100 as CIFAR100,
        CINIC10 as CINIC10,
        EMNIST as EMNIST,
        GTSRB as GTSRB,
        MNIST as MNIST,
        SVHN as SVHN,
        FashionMNIST as FashionMNIST,
    )
    from flsuite.data.federated import (
        DataSpec as DataSpec,
        DataSplit as DataSplit,
        FederatedData as FederatedData,
        PublishedSplits as PublishedSplits,
    )
    from flsuite.data.images import Augment as Augment, CropFlip as CropFlip
    from flsuite.data.module import FederatedDataModule as FederatedDataModule
    from flsuite.data.partitions.base import Partition as Partition
    from flsuite.data.partitions.dirichlet import (
        Dirichlet as Dirichlet,
        DirichletBalanced as DirichletBalanced,
        DirichletExtended as DirichletExtended,
        DirichletProportions as DirichletProportions,
    )
    from flsuite.data.partitions.from_file import FromFile as FromFile
    from flsuite.data.partitions.shares import (
        IID as IID,
        Natural as Natural,
        Pathological as Pathological,
        QuantitySkew as QuantitySkew,
        Ranked as Ranked,
        SoleOwner as SoleOwner,
    )
    from flsuite.data.skews import (
        FeatureSkew as FeatureSkew,
        LabelNoise as LabelNoise,
        Skew as Skew,
    )
    from flsuite.data.tasks import TaskSequence as TaskSequence


__getattr__, __dir__ = on_first_use(__name__)
