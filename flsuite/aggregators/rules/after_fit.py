"""Client callbacks that measure the trained model without changing it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext
from flsuite.common.random import torch_generator
from flsuite.data.federated import Batch, Task
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.estimates import measuring
from flsuite.models.abilities import LogitModel

Measure = Callable[[Any, Iterator[Batch], Task, torch.Generator], Any]
"""Measures a trained :class:`~flsuite.models.abilities.LogitModel` on batches on its device, given
the data's task and the client's own randomness in this round."""


class AfterFit(Callback, ABC):
    """Measures the trained model at the end of a client's fit.

    It changes neither the weights nor the random generators. A fit with known weights can therefore
    be measured without training again: the result depends only on the weights, the client's
    samples, the seed and the round.

    The duration is logged as ``after_fit_seconds``.

    Args:
        client: The fit. The result goes into ``client.extras``.
    """

    def __init__(self, client: ClientContext) -> None:
        self.client = client

    @abstractmethod
    def after_fit(self, module: LightningModule, loader: TrainLoader) -> None:
        """Measure the model on the client's samples.

        Args:
            module: The trained model.
            loader: The client's training batches, see
                :meth:`~flsuite.data.loader.TrainLoader.plain_batches`.
        """

    def measure(self, module: LightningModule, loader: TrainLoader) -> None:
        """Measure the model, and the duration of the measurement."""
        started = time.perf_counter()
        self.after_fit(module, loader)
        self.client.metrics["after_fit_seconds"] = time.perf_counter() - started

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, TrainLoader):
            raise FlsuiteError(
                f"{type(self).__name__} needs the training batches of flsuite, but a hook has "
                f"replaced them by {type(loader).__name__}"
            )
        self.measure(pl_module, loader)


class LogitPass(AfterFit):
    """One pass over the client's samples without augmentation, in evaluation mode and float32.

    Args:
        client: The fit.
        owner: Name of the aggregator, for messages and for the client's own randomness.
        samples: The maximum number of samples. Default: all.
        name: Name of the statistic that the client sends.
        statistic: Computes the statistic.
    """

    def __init__(
        self, client: ClientContext, owner: str, samples: int | None, name: str, statistic: Measure
    ) -> None:
        super().__init__(client)
        self.owner, self.samples = owner, samples
        self.name, self.statistic = name, statistic

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require_logits(pl_module)

    def after_fit(self, module: LightningModule, loader: TrainLoader) -> None:
        # Checked here too, because a fit with known weights has no start.
        self._require_logits(module)
        generator = torch_generator(loader.seed, self.owner, loader.round, loader.client)
        with measuring(module):
            self.client.extras[self.name] = self.measured(module, loader, generator)

    def measured(self, module: Any, loader: TrainLoader, generator: torch.Generator) -> Any:
        """Return the statistic of the client's samples."""
        batches = self.batches(module, loader, self.samples)
        return self.statistic(module, batches, loader.data.spec.task, generator)

    def batches(
        self, module: LightningModule, loader: TrainLoader, most: int | None = None
    ) -> Iterator[Batch]:
        """Yield the client's samples, or at most so many of them, on the model's device."""
        for x, y in loader.plain_batches(most):
            yield x.to(module.device), y.to(module.device)

    def _require_logits(self, module: LightningModule) -> None:
        if not isinstance(module, LogitModel):
            raise FlsuiteError(
                f"{self.owner} needs the logits of the model, but {type(module).__name__} has "
                "none: add a method logits(x) -> (n, outputs), or choose another aggregator"
            )
