"""Partitions: the ways to split one dataset over clients."""

from flsuite.data.partitions.base import Partition, partition_labels
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

__all__ = [
    "IID",
    "Dirichlet",
    "DirichletBalanced",
    "DirichletExtended",
    "DirichletProportions",
    "Natural",
    "Partition",
    "Pathological",
    "QuantitySkew",
    "Ranked",
    "SoleOwner",
    "partition_labels",
]
