"""A dataset that is split over clients.

A client is an index array into tensors that are in memory once. A batch is one index operation and
one cast. This module is independent of training.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flsuite.common.messages import POOLED
from flsuite.data.images import Augment, Scaling
from flsuite.data.map_style import StoredSplit
from flsuite.data.spec import Batch, DataSpec, DataSplit


@dataclass(frozen=True)
class Stage:
    """The position of a federation in a sequence of tasks.

    Attributes:
        task: The number of the task, from 0.
        seen: Classes that any client has met so far, including this task.
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
        train: The training split. It includes held-out rows, which belong to no client's rows.
        test: The test split.
        val: The validation split: the published one, without client rows, or the samples that
            clients hold out. ``None`` if there is neither.
        scaling: The map from stored samples to model inputs.
        batch_size: Samples per training batch.
        augment: The random augmentation of training batches.
        stage: The current task. ``None`` without tasks.
        server: The server's own samples, which are in no other split. ``None`` if the server has
            none.
        unseen: Number of clients outside the federation, which have the last rows of the splits.
            They never take part in a round.
    """

    spec: DataSpec
    train: DataSplit
    test: DataSplit
    val: DataSplit | None
    scaling: Scaling
    batch_size: int
    augment: Augment | None = None
    stage: Stage | None = None
    server: DataSplit | None = None
    unseen: int = 0

    def at(self, round: int) -> "FederatedData":
        """Return the data that clients train on in a round and are scored on after it.

        It is the same in every round, unless there are tasks.
        """
        return self

    @property
    def clients(self) -> int:
        """Return the number of clients in the federation."""
        return len(self.train.rows) - self.unseen

    def train_rows(self, client: int) -> Tensor:
        """Return the rows of ``train`` that a client trains on, int64 ``(samples,)``."""
        rows = self.train.rows
        if client == POOLED:
            return rows.values[: int(rows.offsets[self.clients])]
        return rows[client]

    def samples(self, client: int) -> int:
        """Return the number of a client's training samples."""
        return len(self.train_rows(client))

    def class_counts(self, client: int) -> Tensor:
        """Return a client's training samples per class, or positives per label, int64."""
        y = self.train.classes[self.train_rows(client)]
        # minlength adds zeros for classes that the client does not have.
        if y.ndim == 1:
            return torch.bincount(y, minlength=self.spec.num_classes)
        return y.sum(0, dtype=torch.int64)

    def batches_of(
        self,
        split: DataSplit,
        batch_rows: Iterable[Tensor],
        generator: torch.Generator | None = None,
    ) -> Iterator[Batch]:
        """Yield a batch for each of these row sets of a split, as model inputs.

        Args:
            split: The samples.
            batch_rows: The rows of each batch.
            generator: Randomness of the augmentation. Default: no augmentation.
        """
        if isinstance(split, StoredSplit):
            yield from split.batches(batch_rows, generator)
            return
        for rows in batch_rows:
            rows = rows.to(split.x.device)
            # index_select copies whole images, while an index copies byte by byte.
            x = self.scaling(split.x.index_select(0, rows))
            if generator is not None and self.augment is not None:
                x = self.augment(x, generator)
            yield x, split.y.index_select(0, rows)

    def to(self, device: torch.device) -> "FederatedData":
        """Return the data with the training tensors on ``device``.

        Batches then need no transfer.
        """
        if device.type == "cpu":
            return self

        # Index arrays stay on the CPU, where they can index a tensor on any device.
        train = self.train.to(device)
        scaling = replace(
            self.scaling, scale=self.scaling.scale.to(device), shift=self.scaling.shift.to(device)
        )
        return replace(self, train=train, scaling=scaling)
