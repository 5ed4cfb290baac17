"""Partitions: the ways to split one dataset over clients."""

from flsuite.data.partitions.base import Partition, partition_labels
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

__all__ = [
    "IID",
    "Dirichlet",
    "DirichletBalanced",
    "DirichletExtended",
    "DirichletProportions",
    "FromFile",
    "Natural",
    "Partition",
    "Pathological",
    "QuantitySkew",
    "Ranked",
    "SoleOwner",
    "partition_labels",
]
