"""What a dataset is before it is dealt to clients: arrays in memory and a description of them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["DataSplit", "DataSpec", "PublishedSplits", "Task"]

Task = Literal["multiclass", "binary", "ordinal", "multilabel"]


@dataclass(frozen=True)
class DataSpec:
    """What a model must know of the data to be built.

    Attributes:
        shape: Of one sample as the model sees it: ``(channels, height, width)``, or ``(features,)`` for tables.
        num_classes: Classes, or labels for a multi-label task.
        task: ``binary`` and ``ordinal`` are trained as two- and many-class problems; ``multilabel`` has 0/1 targets per label.
        class_names: One name a class, for tables and pictures.
    """

    shape: tuple[int, ...]
    num_classes: int
    task: Task = "multiclass"
    class_names: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "DataSpec":
        return cls(
            tuple(plain["shape"]), plain["num_classes"], plain["task"], tuple(plain["class_names"])
        )


@dataclass
class DataSplit:
    """One split, whole, in memory.

    Attributes:
        x: Images as uint8 ``(n, height, width, channels)``; tables as float32 ``(n, features)``.
        y: Targets: int64 ``(n,)``, or uint8 ``(n, labels)`` for a multi-label task.
        ids: int64 ``(n,)``, who a sample belongs to by nature (a writer, a device); ``None`` where the data does not say.
    """

    x: Tensor
    y: Tensor
    ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> "DataSplit":
        return DataSplit(
            self.x[index], self.y[index], None if self.ids is None else self.ids[index]
        )

    @staticmethod
    def concat(parts: "list[DataSplit]") -> "DataSplit":
        ids = [p.ids for p in parts if p.ids is not None]
        return DataSplit(
            torch.cat([p.x for p in parts]),
            torch.cat([p.y for p in parts]),
            torch.cat(ids) if len(ids) == len(parts) else None,
        )


@dataclass
class PublishedSplits:
    """A dataset as its publisher splits it; ``val`` is ``None`` where there is no published validation split."""

    spec: DataSpec
    train: DataSplit
    test: DataSplit
    val: DataSplit | None = None
