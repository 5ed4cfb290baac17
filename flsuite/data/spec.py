"""A dataset before it is split over clients: arrays in memory, and their description."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flsuite.data.rows import RaggedIndex

Batch = tuple[Tensor, Tensor]
"""Inputs and targets. A dataset with a collate function may have batches of another structure."""

Task = Literal["multiclass", "binary", "ordinal", "multilabel", "other"]
"""The kind of classification; ``binary`` and ``ordinal`` are trained as ``multiclass``.

``other`` is any other problem, such as a regression. Its classes are only for partitions."""


@dataclass(frozen=True)
class DataSpec:
    """The properties of the data that a model is built from.

    Attributes:
        shape: The shape of a model input: ``(channels, height, width)`` of an image,
            ``(features,)`` of a table row.
        num_classes: Number of classes, or labels of a multi-label task.
        task: The kind of classification. ``multilabel`` has one target of 0 or 1 per label.
        class_names: One name per class, for tables and figures. Empty if there are none.
    """

    shape: tuple[int, ...]
    num_classes: int
    task: Task = "multiclass"
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # File readers return NumPy scalars, which cannot be loaded from a checkpoint.
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "num_classes", int(self.num_classes))
        object.__setattr__(self, "class_names", tuple(str(name) for name in self.class_names))

    @property
    def names(self) -> tuple[str, ...]:
        """Return one name per class: its number if there are no class names."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "DataSpec":
        """Restore a spec from :meth:`to_dict`."""
        return cls(
            tuple(plain["shape"]), plain["num_classes"], plain["task"], tuple(plain["class_names"])
        )


@dataclass
class DataSplit:
    """One split of a dataset in memory.

    Attributes:
        x: Images as uint8 ``(n, height, width, channels)``, or tables as float32 ``(n, features)``.
        y: Targets: int64 ``(n,)``, uint8 ``(n, labels)`` for a multi-label task, or any tensor with
            one row per sample for the task ``other``.
        ids: int64 ``(n,)``, the natural owner of each sample (a writer, a device). ``None`` if the
            data has none.
        labels: int64 ``(n,)``, one class per sample for partitions, if ``y`` has no classes.
        rows: The rows of each client. Empty before the data is split over clients, and in a split
            without client rows.
    """

    x: Tensor
    y: Tensor
    ids: Tensor | None = None
    labels: Tensor | None = None
    rows: RaggedIndex = field(default_factory=lambda: RaggedIndex.of(()))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> "DataSplit":
        """Return the samples at these rows, without client rows."""
        return replace(
            self,
            x=self.x[index],
            y=self.y[index],
            ids=None if self.ids is None else self.ids[index],
            labels=None if self.labels is None else self.labels[index],
            rows=RaggedIndex.of(()),
        )

    def owned(self) -> "DataSplit":
        """Return the clients' samples, client by client."""
        numbers = torch.arange(len(self.rows.values))
        return replace(self.take(self.rows.values), rows=RaggedIndex(numbers, self.rows.offsets))

    @property
    def classes(self) -> Tensor:
        """Return the classes for a partition, in the format of a classification's ``y``."""
        return self.y if self.labels is None else self.labels

    def to(self, device: torch.device) -> "DataSplit":
        """Return the samples and their targets on another device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


@dataclass
class PublishedSplits:
    """A dataset in its published splits.

    ``val`` is ``None`` if there is no published validation split.
    """

    spec: DataSpec
    train: DataSplit
    test: DataSplit
    val: DataSplit | None = None
