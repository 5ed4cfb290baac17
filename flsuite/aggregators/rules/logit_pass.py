"""A client half that measures the trained model's logits on the client's own samples."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from flsuite.aggregators.rules.after_fit import AfterFit
from flsuite.data.loader import Batch, TrainLoader
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext
from flsuite.metrics.fisher import measuring
from flsuite.models.protocols import LogitModel
from flsuite.random import torch_generator

__all__ = ["LogitPass"]


class LogitPass(AfterFit):
    """One pass over the client's samples without augmentation, in evaluation mode and float32.

    Args:
        client: The fit.
        owner: Name of the aggregator, for messages.
        samples: The largest number of samples. Default: all.
    """

    def __init__(self, client: ClientContext, owner: str, samples: int | None) -> None:
        super().__init__(client)
        self.owner = owner
        self.samples = samples

    @abstractmethod
    def extras(
        self, module: LightningModule, batches: Iterator[Batch], generator: torch.Generator
    ) -> dict[str, Any]:
        """Return what the client sends beside its model.

        Args:
            module: The trained model, a :class:`~flsuite.models.protocols.LogitModel`.
            batches: The samples, on the module's device.
            generator: The client's own randomness in this round.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._require_logits(pl_module)

    def after_fit(self, module: LightningModule, loader: TrainLoader) -> None:
        # Here too: a fit that is known already has no start.
        self._require_logits(module)
        generator = torch_generator(loader.seed, self.owner, loader.round, loader.client)
        device = module.device
        batches = ((x.to(device), y.to(device)) for x, y in loader.plain_batches(self.samples))

        with measuring(module):
            self.client.extras |= self.extras(module, batches, generator)

    def _require_logits(self, module: LightningModule) -> None:
        if not isinstance(module, LogitModel):
            raise FlsuiteError(
                f"{self.owner} needs the logits of the model, and {type(module).__name__} has "
                "none: add a method logits(x) -> (n, outputs), or choose another aggregator"
            )
