"""A dataset dealt to clients: everything that a worker needs to train any of them, and nothing that knows of training.

A client is an index array into tensors that lie in memory once. A batch is one index and one cast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from flsuite.data.augment import Augment
from flsuite.data.spec import DataSpec, DataSplit
from flsuite.messages import POOLED
from flsuite.random import torch_generator

__all__ = ["Batch", "FederatedData", "Ragged", "Scaling", "Stage", "TrainLoader", "batch_bounds"]

Batch = tuple[Tensor, Tensor]


@dataclass
class Ragged:
    """Many index arrays in one: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Ragged":
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        values = np.concatenate(rows).astype(np.int64) if len(rows) else np.zeros(0, np.int64)
        return cls(
            torch.from_numpy(values), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def owners(self) -> Tensor:
        """The row that each value is in."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths())

    def where(self, kept: Tensor) -> "Ragged":
        """The values at which ``kept``, a bool a value, is true."""
        counts = torch.bincount(self.owners()[kept], minlength=len(self))
        return Ragged(self.values[kept], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


@dataclass
class Scaling:
    """From stored bytes to what the model sees: ``x * scale + shift`` per channel, grey repeated to ``channels``."""

    scale: Tensor
    shift: Tensor
    channels: int

    def __call__(self, x: Tensor) -> Tensor:
        """uint8 ``(n, h, w, c)`` to float32 ``(n, channels, h, w)`` in channels_last strides; tables pass through."""
        if x.dtype != torch.uint8:
            return x
        scaled = x.to(torch.float32).mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)
        if scaled.shape[1] == self.channels:
            return scaled
        return scaled.expand(-1, self.channels, -1, -1).contiguous(
            memory_format=torch.channels_last
        )


def batch_bounds(samples: int, batch_size: int) -> list[tuple[int, int]]:
    """Where an epoch is cut. A last batch of one sample, which BatchNorm cannot train on, joins its neighbour."""
    cuts = list(range(0, samples, batch_size))
    if len(cuts) > 1 and samples - cuts[-1] == 1:
        cuts.pop()
    return list(zip(cuts, [*cuts[1:], samples], strict=True))


@dataclass
class TrainLoader:
    """Shuffled batches of one client in one round; epoch ``e`` has its own order, whatever was drawn before it.

    Attributes:
        batches: Batches in an epoch; ``None`` is one pass over the samples. More than a pass goes on with a new order.
    """

    data: "FederatedData"
    client: int
    seed: int
    round: int
    batches: int | None = None
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._rows = self.data.train_rows(self.client)
        if (
            len(self._rows) == 1
        ):  # seen twice: the mean gradient is the same, and BatchNorm has two samples to work on
            self._rows = self._rows.repeat(2)
        self._bounds = batch_bounds(len(self._rows), self.data.batch_size)
        self._length = len(self._bounds) if self.batches is None else self.batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        generator = torch_generator(self.seed, f"batches/{epoch}", self.round, self.client)
        left = self._length
        while left > 0:
            order = self._rows[torch.randperm(len(self._rows), generator=generator)]
            for start, stop in self._bounds[:left]:
                yield self.data.train_batch(order[start:stop], generator)
            left -= len(self._bounds)


@dataclass(frozen=True)
class Stage:
    """Where a federation is in a sequence of tasks.

    Attributes:
        task: Number of the task, from 0.
        seen: Classes that any client has met by now, those of this task included.
        past: Those that any had met before this task.
    """

    task: int
    seen: tuple[int, ...]
    past: tuple[int, ...]


@dataclass
class FederatedData:
    """Attributes:
    train_index, val_index: Rows of ``train`` per client, disjoint.
    test_index: Rows of ``test`` per client: the published test split dealt with each client's own class mix.
    val: The publisher's validation split, if it is the one in use.
    stage: The task that the clients are in, where there are tasks.
    """

    spec: DataSpec
    train: DataSplit
    test: DataSplit
    val: DataSplit | None
    train_index: Ragged
    val_index: Ragged
    test_index: Ragged
    scaling: Scaling
    batch_size: int
    augment: Augment | None = None
    stage: Stage | None = None

    def at(self, round: int) -> "FederatedData":
        """What the clients train on in this round, and are scored on after it: always the same, unless there are tasks."""
        return self

    @property
    def clients(self) -> int:
        return len(self.train_index)

    def train_rows(self, client: int) -> Tensor:
        return self.train_index.values if client == POOLED else self.train_index[client]

    def samples(self, client: int) -> int:
        return len(self.train_rows(client))

    def batches(self, client: int) -> int:
        return len(batch_bounds(self.samples(client), self.batch_size))

    def class_counts(self, client: int) -> Tensor:
        """int64 ``(classes,)``: training samples of each class, or positives of each label."""
        y = self.train.y[self.train_rows(client)]
        return (
            torch.bincount(y, minlength=self.spec.num_classes)
            if y.ndim == 1
            else y.sum(0, dtype=torch.int64)
        )

    def train_batch(self, rows: Tensor, generator: torch.Generator) -> Batch:
        x = self.scaling(self.train.x[rows])
        return (x if self.augment is None else self.augment(x, generator)), self.train.y[rows]

    def loader(self, client: int, seed: int, round: int, batches: int | None = None) -> TrainLoader:
        return TrainLoader(self, client, seed, round, batches)

    def validation(self) -> DataSplit | None:
        """The global validation split: the publisher's, or the clients' own put together, or ``None``."""
        if self.val is not None:
            return self.val
        return self.train.take(self.val_index.values) if len(self.val_index.values) else None

    def to(self, device: torch.device) -> "FederatedData":
        """The training tensors on ``device``, so that a batch needs no transfer."""
        if device.type == "cpu":
            return self
        train = DataSplit(self.train.x.to(device), self.train.y.to(device))
        scaling = replace(
            self.scaling, scale=self.scaling.scale.to(device), shift=self.scaling.shift.to(device)
        )
        return replace(self, train=train, scaling=scaling)
