"""Clients whose problem has a known answer: client ``i`` minimises ``a_i / 2 (w - m_i)^2`` over one number ``w``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from flsuite import FederatedTrainer
from flsuite.aggregators import Aggregator
from flsuite.data import FederatedDataModule
from flsuite.data.partitions import Natural
from flsuite.data.spec import DataSpec, DataSplit, PublishedSplits
from flsuite.models.base import ClientModel


class Quadratic(ClientModel):
    """A batch ``(n, 2)`` holds curvature and minimum; a curvature below zero raises, an infinite one ruins the update."""

    def __init__(self, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.optimizer = optimizer or partial(SGD, lr=0.05)

    def build(self, spec: DataSpec) -> None:
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        a, m = batch[0].unbind(1)
        if (a < 0).any():
            raise RuntimeError("no minimum")
        return (a / 2 * (self.w - m).square()).mean()

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {
            "loss": batch[1] * 0.0,
            "scores": torch.full((len(batch[1]), self.spec.num_classes), 0.5),
        }

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer(self.parameters())


class Quadratics(FederatedDataModule):
    """One client a row of the table."""

    def __init__(
        self,
        curvatures: Sequence[float],
        minima: Sequence[float],
        samples: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            clients=len(curvatures), partition=Natural(), batch_size=1000, val_fraction=0.0
        )
        self.curvatures = tuple(curvatures)
        self.minima = tuple(minima)
        self.samples = tuple(samples or [1] * len(curvatures))

    def load(self) -> PublishedSplits:
        table = torch.tensor([self.curvatures, self.minima]).T
        owners = torch.arange(self.clients)
        rows = owners.repeat_interleave(torch.tensor(self.samples))
        spec = DataSpec((2,), max(2, self.clients))
        return PublishedSplits(spec, DataSplit(table[rows], rows, rows), DataSplit(table, owners))


def federation(aggregator: Aggregator, rounds: int, **kwargs: Any) -> FederatedTrainer:
    """A silent trainer that leaves nothing on disk, unless told where."""
    defaults = {
        "evaluate_every": 1000,
        "enable_checkpointing": "run_dir" in kwargs,
        "enable_progress_bar": False,
    }
    return FederatedTrainer(
        rounds, aggregator, **{"accelerator": "cpu", "seed": 3, **defaults, **kwargs}
    )


def optimum(
    aggregator: Aggregator, data: Quadratics, rounds: int, steps: int = 10, **kwargs: Any
) -> float:
    """Where a federation ends whose clients take ``steps`` steps a round."""
    model = kwargs.pop("model", None) or Quadratic()
    trainer = federation(aggregator, rounds, max_epochs=steps, **kwargs)
    trainer.fit(model, data)
    return float(trainer.federation.state["w"])
