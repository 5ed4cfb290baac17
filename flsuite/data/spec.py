"""A dataset before it is split over clients: arrays in memory and their description."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flsuite.data.rows import RaggedIndex

Batch = tuple[Tensor, Tensor]
"""Inputs and targets. A dataset with a collate function may have batches of another structure."""

Task = Literal["multiclass", "binary", "ordinal", "multilabel", "other"]
"""The kind of classification; ``binary`` and ``ordinal`` are trained as ``multiclass``.

``other`` is any other problem, such as a regression. Its classes are for partitions alone."""


@dataclass(frozen=True)
class DataSpec:
    """The properties of the data that a model is built from.

    Attributes:
        shape: One sample as the model sees it: ``(channels, height, width)`` of an image,
            ``(features,)`` of a table row.
        num_classes: Classes, or labels of a multi-label task.
        task: The kind of classification. ``multilabel`` has one target of 0 or 1 per label.
        class_names: One name per class, for tables and figures. It is empty where there are none.
    """

    shape: tuple[int, ...]
    num_classes: int
    task: Task = "multiclass"
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Readers of files return NumPy's numbers and names, which cannot be read from a checkpoint.
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "num_classes", int(self.num_classes))
        object.__setattr__(self, "class_names", tuple(str(name) for name in self.class_names))

    @property
    def names(self) -> tuple[str, ...]:
        """Return one name per class: its number where there are no class names."""
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
            one row per sample where the task is ``other``.
        ids: int64 ``(n,)``, the natural owner of each sample (a writer, a device). It is ``None``
            where the data has none.
        labels: int64 ``(n,)``, one class per sample for partitions, where ``y`` has none.
        rows: The rows that each client has. There are no clients before the data is split over
            them, and in a split that is nobody's own.
    """

    x: Tensor
    y: Tensor
    ids: Tensor | None = None
    labels: Tensor | None = None
    rows: RaggedIndex = field(default_factory=lambda: RaggedIndex.of(()))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> "DataSplit":
        """Return the samples at these rows, of which no client has any."""
        return replace(
            self,
            x=self.x[index],
            y=self.y[index],
            ids=None if self.ids is None else self.ids[index],
            labels=None if self.labels is None else self.labels[index],
            rows=RaggedIndex.of(()),
        )

    def owned(self) -> "DataSplit":
        """Return the samples that clients have, client after client."""
        numbers = torch.arange(len(self.rows.values))
        return replace(self.take(self.rows.values), rows=RaggedIndex(numbers, self.rows.offsets))

    @property
    def classes(self) -> Tensor:
        """Return the classes that a partition sees, as ``y`` of a classification has them."""
        return self.y if self.labels is None else self.labels

    def to(self, device: torch.device) -> "DataSplit":
        """Return the samples and their targets on another device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    @staticmethod
    def concat(parts: "list[DataSplit]") -> "DataSplit":
        """Join splits.

        The result has ids if all of them have.
        """
        ids = [p.ids for p in parts if p.ids is not None]
        labels = [p.labels for p in parts if p.labels is not None]
        return DataSplit(
            torch.cat([p.x for p in parts]),
            torch.cat([p.y for p in parts]),
            torch.cat(ids) if len(ids) == len(parts) else None,
            torch.cat(labels) if len(labels) == len(parts) else None,
        )


@dataclass
class PublishedSplits:
    """A dataset in the splits of its publisher.

    ``val`` is ``None`` where there is none.
    """

    spec: DataSpec
    train: DataSplit
    test: DataSplit
    val: DataSplit | None = None
