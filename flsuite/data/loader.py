"""Batch loaders: a client's shuffled training batches, and a split's batches in order."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, tee
from typing import Any

import torch
from torch import Tensor

from flsuite.common.random import torch_generator
from flsuite.data.federated import Batch, DataSplit, FederatedData, unchanged

_SMALL = 2**23  # bytes
_ALIGNED = 64  # bytes


def batch_bounds(samples: int, batch_size: int) -> list[tuple[int, int]]:
    """Return where each batch of an epoch starts and stops.

    A last batch of one sample, which BatchNorm cannot train on, is merged into the previous one.
    """
    starts = list(range(0, samples, batch_size))
    if len(starts) > 1 and samples - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], samples], strict=True))


@dataclass
class TrainLoader:
    """Shuffled batches of one client in one round.

    Each epoch has its own order, which does not depend on earlier draws.

    Attributes:
        data: The samples of all clients.
        client: The client's number.
        seed: The run's seed.
        round: The round, counted from 1.
        batches: Batches per epoch. Default: one pass over the samples. A larger number continues
            with a new order after each pass.
        repeat: Number of earlier fits that the client started from the same version. Each fit has
            other orders.
        epochs: Epochs of the fit, which are read at once if they are small.
        epoch: The number of the next epoch, from 0.
        is_poisson: Whether to draw each sample for a batch independently of other samples and
            earlier batches, with the probability for which the batch size is the mean.
        drawn: Numbers of samples drawn for the batches of this epoch, under Poisson sampling. If
            none was drawn, the batch has one sample that must not count.
        change: A final change of each batch, such as an attacker's. Default: none.
    """

    data: FederatedData
    client: int
    seed: int
    round: int
    batches: int | None = None
    repeat: int = 0
    epochs: int = 1
    epoch: int = field(default=0, init=False)
    is_poisson: bool = field(default=False, init=False)
    drawn: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.change: Callable[[Any], Any] = unchanged
        self._read: dict[int, Iterable[Batch]] = {}
        self._rows = self.data.train_rows(self.client)
        if len(self._rows) == 1:
            # A repeated single sample has the same mean gradient, and BatchNorm can train on it.
            self._rows = self._rows.repeat(2)
        self._samples = len(self._rows)
        self._sizes = [b - a for a, b in batch_bounds(self._samples, self.data.batch_size)]
        self._length = len(self._sizes) if self.batches is None else self.batches

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if epoch not in self._read:
            self._read = self._read_from(epoch)
        yield from map(self.change, self._read.pop(epoch))

    def _read_from(self, epoch: int) -> dict[int, Iterable[Batch]]:
        """Return the batches of an epoch by its number, and of later epochs if they are small.

        Small ones are read at once, which is faster. They are parts of one tensor, and begin where
        a tensor of their own could, because matrix products may round differently elsewhere.
        """
        own = self.data.train
        is_apart = self.is_poisson or self.data.augment is not None or not own.in_memory
        size = 4 * math.prod(own.x.shape[1:])
        most = _SMALL // max(size * max(self._sizes, default=0) * self._length, 1)
        if is_apart or size % _ALIGNED or not most or not self._sizes:
            generator = self._generator(epoch)
            return {epoch: self.data.batches_of(own, self._batch_rows(generator), generator)}

        numbers = range(epoch, epoch + max(min(most, self.epochs - epoch), 1))
        drawn = chain.from_iterable(self._passes(self._generator(number)) for number in numbers)
        rows, sizes = zip(*drawn, strict=True)
        (parts,) = self.data.batches_of(own, [torch.cat(rows)])
        # No views to autograd, which refuses a step that multiplies them by a weight.
        split = ([one.data for one in part.split_with_sizes([*chain(*sizes)])] for part in parts)
        batches = zip(*split, strict=True)
        return {number: [*islice(batches, self._length)] for number in numbers}

    def rows(self) -> Iterator[Tensor]:
        """Return the rows of each batch of the next epoch, int64.

        An augmentation draws from the same randomness between two passes over the samples, so its
        batches are read as well.
        """
        self.epoch += 1
        generator = self._generator(self.epoch - 1)
        if self.data.augment is None:
            return self._batch_rows(generator)
        rows, read = tee(self._batch_rows(generator))
        batches = self.data.batches_of(self.data.train, read, generator)
        return (own for own, _ in zip(rows, batches, strict=True))

    def _batch_rows(self, generator: torch.Generator) -> Iterator[Tensor]:
        if self.is_poisson:
            return iter(self._poisson_rows(generator))
        passes = self._passes(generator)
        return chain.from_iterable(rows.split_with_sizes(sizes) for rows, sizes in passes)

    def _generator(self, epoch: int) -> torch.Generator:
        """Return the randomness of an epoch, so a resumed run has the same batches."""
        stream = f"batches/{epoch}/{self.repeat}" if self.repeat else f"batches/{epoch}"
        return torch_generator(self.seed, stream, self.round, self.client)

    def _passes(self, generator: torch.Generator) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the rows of all batches and their sizes, pass by pass over the samples."""
        left = self._length
        while left > 0:
            order = torch.randperm(self._samples, generator=generator)
            sizes = self._sizes
            if left < len(sizes):  # the last pass ends early
                sizes = sizes[:left]
                order = order[: sum(sizes)]
            yield self._rows.index_select(0, order), sizes
            left -= len(sizes)

    def _poisson_rows(self, generator: torch.Generator) -> list[Tensor]:
        """Draw the rows of all batches of an epoch."""
        rows = self.data.train_rows(self.client)
        rate = min(1.0, self.data.batch_size / len(rows))
        masks = torch.rand(self._length, len(rows), generator=generator) < rate
        self.drawn = masks.sum(1).tolist()
        # A model cannot train on an empty batch.
        return [rows[mask] if mask.any() else rows[:1] for mask in masks]

    def plain_batches(self, samples: int | None = None, batch_size: int = 500) -> Iterator[Batch]:
        """Return one pass over the client's samples, in order and without augmentation.

        Args:
            samples: Maximum number of samples. If the client has more, a random subset is used, the
                same for the same seed, client and round. Default: all.
            batch_size: Samples per batch. A last batch of one sample is merged, as in training.
        """
        rows = self.data.train_rows(self.client)
        if samples is not None and samples < len(rows):
            generator = torch_generator(self.seed, "plain_batches", self.round, self.client)
            rows = rows[torch.randperm(len(rows), generator=generator)[:samples].sort().values]
        parts = (rows[a:b] for a, b in batch_bounds(len(rows), batch_size))
        yield from map(self.change, self.data.batches_of(self.data.train, parts))


@dataclass
class SplitLoader:
    """Batches of some rows of a split, in order.

    Attributes:
        data: It converts stored samples to model inputs.
        samples: The split.
        batch_size: Samples per batch.
        rows: int64, the rows. Default: all.
        parts: Rows by part. A batch has rows of one part only. Default: one part.
        ends: The number of batches up to the end of each part that has rows.
    """

    data: FederatedData
    samples: DataSplit
    batch_size: int
    rows: Tensor | None = None
    parts: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        rows = torch.arange(len(self.samples)) if self.rows is None else self.rows
        parts = [part for part in self.parts or [rows] if len(part)]
        batches = [part.split(self.batch_size) for part in parts]
        self._batch_rows = [*chain.from_iterable(batches)]
        self.ends = [*accumulate(map(len, batches))]

    def __len__(self) -> int:
        return len(self._batch_rows)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.data.batches_of(self.samples, self._batch_rows))
