"""Splits whose samples stay in a dataset of somebody else, and are read batch by batch."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from flsuite.data.spec import DataSplit
from flsuite.errors import FlsuiteError, one_line
from flsuite.random import seed_cpu, torch_generator

__all__ = ["StoredSplit", "fetch"]


@dataclass
class StoredSplit(DataSplit):
    """A split of a map-style dataset, for samples of any structure.

    Attributes:
        x: int64 ``(n,)``, the numbers of the samples in the dataset.
        y: int64 ``(n,)``, one class per sample, which partitions see.
        dataset: It has ``__getitem__``, and perhaps ``__getitems__``.
        collate: The function from a list of samples to a batch.
        workers: Processes that read ahead. A process that is itself a worker reads alone.
    """

    dataset: Any = None
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0

    def batches(
        self, parts: Iterable[Tensor], generator: torch.Generator | None = None
    ) -> Iterator[Any]:
        """Yield the batches of these rows.

        What a dataset draws while it is read depends on the batch's seed alone, whoever reads it.

        Args:
            parts: The rows of each batch.
            generator: Draws the seeds. Default: the same seeds every time.
        """
        generator = generator or torch_generator(0, "samples")
        orders = [
            (int(torch.randint(1 << 62, (), generator=generator)), self.x[rows].tolist())
            for rows in parts
        ]
        reader = _Reader(self.dataset, self.collate)
        # A worker process of an engine may not have processes of its own.
        if not self.workers or multiprocessing.current_process().daemon:
            return map(reader.__getitem__, orders)
        return iter(
            DataLoader(
                reader,
                batch_size=None,
                sampler=orders,
                num_workers=min(self.workers, len(orders)),
                collate_fn=_unchanged,
                generator=torch.Generator(),  # else it would draw from that of the fit
            )
        )

    def to(self, device: torch.device) -> "StoredSplit":
        """Return the split itself, because its batches are moved one by one."""
        return self


class _Reader(Dataset[Any]):
    """Reads a batch, given its seed and the numbers of its samples."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, order: tuple[int, list[int]]) -> Any:
        seed, numbers = order
        with isolate_rng(include_cuda=False):
            seed_cpu(seed)
            return self._collated(fetch(self.dataset, numbers))

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except RuntimeError as error:
            if self.collate is not default_collate:
                raise
            raise FlsuiteError(
                f"data: samples do not make a batch ({one_line(error, 120)}); if they differ in "
                "length, give FromDataset or your DataLoader a collate function"
            ) from error


def fetch(dataset: Any, numbers: list[int]) -> list[Any]:
    """Return these samples, in one call where the dataset offers it."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(numbers))
    return [dataset[number] for number in numbers]


def _unchanged(batch: Any) -> Any:
    return batch
