"""Partitions: the ways to split one dataset over clients."""

from flsuite.data.partitions.base import (
    Partition as Partition,
    partition_labels as partition_labels,
)
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
