"""A dataset that is split over clients.

A client is an index array into tensors that are in memory once. A batch is one index operation and
one cast. Nothing here depends on training.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flsuite.data.images import Augment, Scaling
from flsuite.data.loader import Batch, TrainLoader, batch_bounds
from flsuite.data.map_style import StoredSplit
from flsuite.data.rows import Rows
from flsuite.data.spec import DataSpec, DataSplit
from flsuite.messages import POOLED


@dataclass
class RaggedIndex:
    """Index arrays of unequal length: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        values: int64 ``(total,)``, all rows one after another.
        offsets: int64 ``(rows + 1,)``, the start of each row. The last entry is the total.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "RaggedIndex":
        """Store these index arrays, one per row."""
        stored = Rows.of(rows)
        return cls(torch.from_numpy(stored.values), torch.from_numpy(stored.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        # An array of NumPy, because reading two numbers of a tensor takes as long as a small copy.
        offsets = self.offsets.numpy()
        return self.values[offsets[row] : offsets[row + 1]]

    def part(self, first: int, last: int) -> "RaggedIndex":
        """Return the rows from ``first`` up to and without ``last``."""
        offsets = self.offsets[first : last + 1]
        start = int(offsets[0])
        return RaggedIndex(self.values[start : int(offsets[-1])], offsets - start)

    def lengths(self) -> Tensor:
        """Return the length of each row, int64 ``(rows,)``."""
        return self.offsets.diff()

    def owners(self) -> Tensor:
        """Return the number of the row that each value is in, int64 ``(total,)``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths())

    def where(self, kept: Tensor) -> "RaggedIndex":
        """Keep the values at which ``kept``, bool ``(total,)``, is true."""
        # Rows without values keep their place with length 0: a row's number is a client's number.
        counts = torch.bincount(self.owners()[kept], minlength=len(self))
        return RaggedIndex(self.values[kept], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


@dataclass(frozen=True)
class Stage:
    """The position of a federation in a sequence of tasks.

    Attributes:
        task: The number of the task, from 0.
        seen: Classes that any client has met so far, this task included.
        past: Classes that any client met before this task.
    """

    task: int
    seen: tuple[int, ...]
    past: tuple[int, ...]


@dataclass
class FederatedData:
    """All that a worker needs to train any client.

    Attributes:
        spec: The description that a model is built from.
        train, test: The published splits.
        val: The published validation split if it is in use, else ``None``.
        train_index, val_index: Rows of ``train`` per client, disjoint.
        test_index: Rows of ``test`` per client.
        scaling: The map from stored samples to model inputs.
        batch_size: Samples per training batch.
        augment: The random change of training batches.
        stage: The task that the clients are in. It is ``None`` where there are no tasks.
        server: The server's own samples, of which no client has any and which are in no other
            split. It is ``None`` where the server has none.
    """

    spec: DataSpec
    train: DataSplit
    test: DataSplit
    val: DataSplit | None
    train_index: RaggedIndex
    val_index: RaggedIndex
    test_index: RaggedIndex
    scaling: Scaling
    batch_size: int
    augment: Augment | None = None
    stage: Stage | None = None
    server: DataSplit | None = None

    def at(self, round: int) -> "FederatedData":
        """Return the data that clients train on in a round and are scored on after it.

        It is the same in every round unless there are tasks.
        """
        return self

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.train_index)

    def train_rows(self, client: int) -> Tensor:
        """Return the rows of ``train`` that a client trains on, int64 ``(samples,)``."""
        return self.train_index.values if client == POOLED else self.train_index[client]

    def samples(self, client: int) -> int:
        """Return the number of a client's training samples."""
        return len(self.train_rows(client))

    def batches(self, client: int) -> int:
        """Return the number of batches in one pass over a client's training samples."""
        return len(batch_bounds(self.samples(client), self.batch_size))

    def class_counts(self, client: int) -> Tensor:
        """Return a client's training samples per class, or positives per label, int64."""
        y = self.train.classes[self.train_rows(client)]
        # minlength counts the classes that the client does not have, as 0.
        if y.ndim == 1:
            return torch.bincount(y, minlength=self.spec.num_classes)
        return y.sum(0, dtype=torch.int64)

    def train_batch(self, rows: Tensor, generator: torch.Generator) -> Batch:
        """Return these rows of ``train`` as model inputs, augmented, and targets."""
        x, y = self.plain_batch(rows)
        return (x if self.augment is None else self.augment(x, generator)), y

    def plain_batch(self, rows: Tensor) -> Batch:
        """Return these rows of ``train`` as model inputs and targets, without augmentation."""
        return next(self.batches_of(self.train, [rows]))

    def train_batches(self, parts: Iterable[Tensor], generator: torch.Generator) -> Iterator[Batch]:
        """Yield a training batch for each of these rows of ``train``."""
        if isinstance(self.train, StoredSplit):
            yield from self.train.batches(parts, generator)
        else:
            for rows in parts:
                yield self.train_batch(rows, generator)

    def batches_of(self, samples: DataSplit, parts: Iterable[Tensor]) -> Iterator[Batch]:
        """Yield a batch for each of these rows of a split, as the model sees it."""
        if isinstance(samples, StoredSplit):
            yield from samples.batches(parts)
        else:
            for rows in parts:
                yield self.scaling(samples.x[rows]), samples.y[rows]

    def loader(
        self, client: int, seed: int, round: int, batches: int | None = None, repeat: int = 0
    ) -> TrainLoader:
        """Return the training batches of a client in a round.

        ``batches`` is their number per epoch. Default: one pass over the samples. ``repeat`` counts
        the fits that the client has started from the same version before.
        """
        return TrainLoader(self, client, seed, round, batches, repeat)

    def validation(self) -> DataSplit | None:
        """Return the global validation split.

        It is the published split, else the validation samples of all clients together, else
        ``None``.
        """
        if self.val is not None:
            return self.val
        return self.train.take(self.val_index.values) if len(self.val_index.values) else None

    def to(self, device: torch.device) -> "FederatedData":
        """Return the data with the training tensors on ``device``.

        Batches then need no transfer.
        """
        if device.type == "cpu":
            return self

        # The index arrays stay: an index on the CPU selects from a tensor on any device.
        train = self.train.to(device)
        scaling = replace(
            self.scaling, scale=self.scaling.scale.to(device), shift=self.scaling.shift.to(device)
        )
        return replace(self, train=train, scaling=scaling)
