"""The training batches of an attacker."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flsuite.data.loader import Batch, BatchSource, TrainLoader
from flsuite.random import torch_generator

__all__ = ["Poison", "PoisonBatches"]

Poison = Callable[[Batch, torch.Generator], Batch]


class PoisonBatches(Callback):
    """Changes all batches of one fit, and those that the algorithm measures after it.

    Args:
        poison: Returns a batch as the attacker trains on it. It must not change the batch itself.
    """

    def __init__(self, poison: Poison) -> None:
        self.poison = poison

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        assert isinstance(loader, TrainLoader)
        stream = f"attack/batches/{loader.repeat}" if loader.repeat else "attack/batches"
        generator = torch_generator(loader.seed, stream, loader.round, loader.client)
        loader.data = _Poisoned(loader.data, self.poison, generator)


@dataclass
class _Poisoned:
    """The samples of a client, as an attacker trains on them."""

    data: BatchSource
    poison: Poison
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.batch_size = self.data.batch_size

    def train_rows(self, client: int) -> Tensor:
        return self.data.train_rows(client)

    def train_batches(self, parts: Iterable[Tensor], generator: torch.Generator) -> Iterator[Batch]:
        for batch in self.data.train_batches(parts, generator):
            yield self.poison(batch, self.generator)

    def plain_batch(self, rows: Tensor) -> Batch:
        return self.poison(self.data.plain_batch(rows), self.generator)
