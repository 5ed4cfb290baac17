"""A dataset: its description, its splits, and its clients.

A client is an index array into tensors that are in memory once. A batch is one index operation and
one cast. This module is independent of training.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import POOLED
from flsuite.common.turns import shared
from flsuite.data.images import Augment, Scaling

Batch = tuple[Tensor, Tensor]
"""Inputs and targets. A dataset with a collate function may have batches of another structure."""

Task = Literal["multiclass", "binary", "ordinal", "multilabel", "other"]
"""The kind of classification; ``binary`` and ``ordinal`` are trained as ``multiclass``.

``other`` is any other problem, such as a regression. Its classes are only for partitions."""


@dataclass(eq=False)
class Rows(Sequence[Any]):
    """One index array per client, stored in one tensor, because a million arrays take a gigabyte.

    Attributes:
        values: int64 ``(total,)``, the arrays one after another.
        offsets: int64 ``(clients + 1,)``, the start of each array. The last entry is the total.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Rows":
        """Return index arrays in one tensor. They are returned as they are if they are in one."""
        if isinstance(rows, Rows):
            return rows
        values = np.concatenate(rows) if len(rows) else np.zeros(0)
        return cls.cut(values, [len(row) for row in rows])

    @classmethod
    def cut(cls, values: np.ndarray, lengths: Sequence[int] | np.ndarray) -> "Rows":
        """Store one array of all rows, cut into arrays of these lengths."""
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls(torch.from_numpy(values.astype(np.int64, copy=False)), torch.from_numpy(offsets))

    @classmethod
    def of_clients(cls, client_of: np.ndarray, clients: int) -> "Rows":
        """Return the ascending rows of each client.

        Args:
            client_of: int64 ``(n,)``, the client of each row. A number outside ``range(clients)``
                means no client.
            clients: Number of clients.
        """
        rows = np.flatnonzero((client_of >= 0) & (client_of < clients))
        own = client_of[rows]
        # Stable, so the rows of a client stay ascending.
        return cls.cut(rows[np.argsort(own, kind="stable")], np.bincount(own, minlength=clients))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: Any) -> Any:
        """Return a client's rows as a tensor, or a list of them for a slice."""
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        # A NumPy array, because reading two numbers of a tensor takes as long as a small copy.
        offsets = self.offsets.numpy()
        number = range(len(offsets) - 1)[client]  # counts from the end if negative, checks bounds
        return self.values[offsets[number] : offsets[number + 1]]

    def part(self, first: int, last: int) -> "Rows":
        """Return the rows of the clients from ``first`` up to but excluding ``last``."""
        offsets = self.offsets[first : last + 1]
        start = int(offsets[0])
        return Rows(self.values[start : int(offsets[-1])], offsets - start)

    def lengths(self) -> Tensor:
        """Return each client's number of rows, int64 ``(clients,)``."""
        return self.offsets.diff()

    def owners(self) -> Tensor:
        """Return the client of each value, int64 ``(total,)``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths())

    def client_of(self, samples: int) -> np.ndarray:
        """Return the client of each sample, int64 ``(samples,)``, or -1 if no client has it."""
        clients = np.full(samples, -1)
        clients[self.values.numpy()] = self.owners().numpy()
        return clients

    def where(self, kept: Tensor) -> "Rows":
        """Keep the values at which ``kept``, bool ``(total,)``, is true."""
        # A client without values remains, because its place is its number.
        counts = torch.bincount(self.owners()[kept], minlength=len(self))
        return Rows.cut(self.values[kept].numpy(), counts.numpy())


@dataclass(frozen=True)
class DataSpec:
    """The properties of the data that a model is built from.

    Attributes:
        shape: The shape of a model input: ``(channels, height, width)`` of an image,
            ``(channels, depth, height, width)`` of a volume, ``(features,)`` of a table row.
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
        """Return plain data for a checkpoint, the arguments of a spec."""
        lists = {"shape": list(self.shape), "class_names": list(self.class_names)}
        return {**asdict(self), **lists}


def unchanged(value: Any) -> Any:
    """Return a value as it is."""
    return value


_COLUMNS = ("x", "y", "ids", "labels", "held", "numbers")  # of a split, with a row per sample


@dataclass
class DataSplit:
    """One split of a dataset in memory.

    Attributes:
        x: Images as uint8 ``(n, height, width, channels)``, volumes with the depth before the
            height, or tables as float32 ``(n, features)``.
        y: Targets: int64 ``(n,)``, uint8 ``(n, labels)`` for a multi-label task, or any tensor with
            one row per sample for the task ``other``.
        ids: int64 ``(n,)``, the natural owner of each sample (a writer, a device). ``None`` if the
            data has none.
        labels: int64 ``(n,)``, one class per sample for partitions, if ``y`` has no classes.
        held: bool ``(n,)``, the training samples that clients hold out for validation. ``None`` if
            a random part of them is held out.
        numbers: int64 ``(n,)``, the place of each sample in the published training and test splits,
            one after the other. ``None`` in other splits.
        rows: The rows of each client. Empty before the data is split over clients, and in a split
            without client rows.
        in_memory: Whether ``x`` holds the samples themselves, and ``y`` their targets.
    """

    in_memory: ClassVar[bool] = True

    x: Tensor
    y: Tensor
    ids: Tensor | None = None
    labels: Tensor | None = None
    held: Tensor | None = None
    numbers: Tensor | None = None
    rows: Rows = field(default_factory=lambda: Rows.of(()))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> "DataSplit":
        """Return the samples at these rows, without client rows."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        taken: dict[str, Any] = {
            k: None if column is None else column[index] for k, column in columns.items()
        }
        return replace(self, **taken, rows=Rows.of(()))

    def owned(self) -> "DataSplit":
        """Return the clients' samples, client by client."""
        numbers = torch.arange(len(self.rows.values))
        return replace(self.take(self.rows.values), rows=Rows(numbers, self.rows.offsets))

    @property
    def classes(self) -> Tensor:
        """Return the classes for a partition, in the format of a classification's ``y``."""
        return self.y if self.labels is None else self.labels

    def batches(
        self,
        batch_rows: Iterable[Tensor],
        to_inputs: Callable[[Tensor], Tensor] = unchanged,
        generator: torch.Generator | None = None,
    ) -> Iterator[Batch]:
        """Yield the batches of these rows.

        Args:
            batch_rows: The rows of each batch.
            to_inputs: The map from stored samples to model inputs.
            generator: Randomness of samples that are random themselves.
        """
        for rows in batch_rows:
            rows = rows.to(self.x.device)
            # index_select copies whole images, while an index copies byte by byte.
            yield to_inputs(self.x.index_select(0, rows)), self.y.index_select(0, rows)

    def shared(self) -> "DataSplit":
        """Return the split with the equal tensors of a run that takes turns with this one."""
        return replace(self, x=shared(self.x), y=shared(self.y)) if self.in_memory else self

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

    def numbered(self) -> "PublishedSplits":
        """Return the splits with the number of each training and test sample."""
        sizes = len(self.train), len(self.test)
        train, test = torch.arange(sum(sizes)).split(sizes)
        return replace(
            self, train=replace(self.train, numbers=train), test=replace(self.test, numbers=test)
        )

    def at(self, numbers: np.ndarray) -> DataSplit:
        """Return the training and test samples of these ascending numbers, as one split.

        Raises:
            FlsuiteError: If the samples of both splits cannot be stored together.
        """
        parts = []
        for split, first in ((self.train, 0), (self.test, len(self.train))):
            own = numbers[(numbers >= first) & (numbers < first + len(split))] - first
            if len(own):  # all of them are the split itself, without a copy
                parts.append(split if len(own) == len(split) else split.take(torch.from_numpy(own)))
        return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[DataSplit]) -> DataSplit:
    """Return the samples of several splits as one, without client rows."""
    if len({(part.in_memory, part.x.shape[1:]) for part in parts}) > 1 or not parts[0].in_memory:
        raise FlsuiteError(
            "data: published training and test samples cannot be mixed, because they differ in "
            "shape or are not in memory; give each split samples of its own"
        )
    columns = {name: [getattr(part, name) for part in parts] for name in _COLUMNS}
    one: dict[str, Any] = {
        name: None if any(value is None for value in values) else torch.cat(values)
        for name, values in columns.items()
    }
    return replace(parts[0], **one)


Groups = tuple[tuple[int, ...], ...]
"""The classes of one client, task by task."""


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
        sequences: The groups of classes of each client, if there are tasks.
        starts: The first round of each task.
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
    sequences: tuple[Groups, ...] = ()
    starts: tuple[int, ...] = ()

    def at(self, round: int) -> "FederatedData":
        """Return the data that clients train on in a round and are scored on after it.

        It is the same in every round, unless there are tasks.
        """
        return self

    def task(self, round: int) -> int:
        """Return the number of the task that a round belongs to."""
        return max(bisect_right(self.starts, round) - 1, 0)

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
        """Return the batches of a split, one per set of rows, as model inputs.

        Args:
            split: The samples.
            batch_rows: The rows of each batch.
            generator: Randomness of the augmentation. Default: no augmentation.
        """

        def to_inputs(x: Tensor) -> Tensor:
            x = self.scaling(x)
            if generator is None or self.augment is None:
                return x
            return self.augment(x, generator)

        return split.batches(batch_rows, to_inputs, generator)

    def to(self, device: torch.device) -> "FederatedData":
        """Return the data with the training tensors on ``device``.

        Batches then need no transfer.
        """
        if device.type == "cpu":
            return self

        # Index arrays stay on the CPU, where they can index a tensor on any device.
        train = self.train.to(device).shared()
        scaling = replace(
            self.scaling, scale=self.scaling.scale.to(device), shift=self.scaling.shift.to(device)
        )
        return replace(self, train=train, scaling=scaling)
