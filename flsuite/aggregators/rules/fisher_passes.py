"""The client halves that measure the Fisher information of the trained model."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Generator

from flsuite.aggregators.rules.after_fit import LogitPass
from flsuite.aggregators.rules.fisher_forms import FisherForm, Sampled
from flsuite.data.loader import Batch
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext
from flsuite.metrics.fisher import (
    Estimator,
    Expectation,
    fisher_diagonal,
    measuring,
    predictive_diagonal,
)
from flsuite.models.protocols import LikelihoodModel
from flsuite.state import State, clone

__all__ = ["EmpiricalPass", "FisherPass", "PredictivePass"]


class PredictivePass(LogitPass):
    """The client half of the predictive Fisher: a pass over the samples after the fit."""

    def __init__(
        self,
        client: ClientContext,
        owner: str,
        names: Sequence[str],
        samples: int | None,
        expectation: Expectation,
    ) -> None:
        super().__init__(client, owner, samples)
        self.names = names
        self.expectation: Expectation = expectation

    def extras(
        self, module: LightningModule, batches: Iterator[Batch], generator: Generator
    ) -> dict[str, Any]:
        fisher = clone(
            predictive_diagonal(module, self.names, batches, self.expectation, generator)
        )
        self.client.metrics["fisher_mass"] = _mass(fisher)
        return {"fisher": fisher}


class FisherPass(LogitPass):
    """The client half of FedFisher: a pass over the samples after the fit."""

    def __init__(
        self, client: ClientContext, form: FisherForm, samples: int | None, expectation: Expectation
    ) -> None:
        super().__init__(client, "FedFisher", samples)
        self.form = form
        self.expectation: Expectation = expectation

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        spec: Any = getattr(pl_module, "spec", None)
        if spec is None:
            raise FlsuiteError(
                f"FedFisher: model must be a flsuite.models.ClientModel, which knows the shape of "
                f"its data, got {type(pl_module).__name__}"
            )
        # Now, because the training would be lost.
        with measuring(pl_module):
            x = torch.zeros(1, *spec.shape, device=pl_module.device)
            self.form.require(pl_module, x)

    def extras(
        self, module: LightningModule, batches: Iterator[Batch], generator: torch.Generator
    ) -> dict[str, Any]:
        sampled = Sampled(batches, self.expectation, generator)
        return {"fisher": self.form.measure(module, sampled)}


class EmpiricalPass(Callback):
    """The client half of the empirical Fisher: a pass over the training batches after the fit."""

    def __init__(
        self, client: ClientContext, names: Sequence[str], estimator: Estimator, batches: int | None
    ) -> None:
        self.client = client
        self.names = names
        self.estimator: Estimator = estimator
        self.batches = batches

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, LikelihoodModel):
            raise FlsuiteError(
                "FisherAveraging needs the log-likelihood of each sample, and "
                f"{type(pl_module).__name__} has none: add a method log_likelihood(batch) -> (n,), "
                "differentiable in its groups, or choose another aggregator"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The batches of the fit: the Fisher is that of the data the parameters were fitted to.
        loader: Any = trainer.train_dataloader
        batches = (
            trainer.strategy.batch_to_device(batch) for batch in islice(loader, self.batches)
        )
        # bfloat16 and dropout would add noise to the squared gradients.
        with measuring(pl_module):
            fisher = clone(fisher_diagonal(pl_module, self.names, batches, self.estimator))

        self.client.extras["fisher"] = fisher
        self.client.metrics["fisher_mass"] = _mass(fisher)


def _mass(fisher: State) -> float:
    """Return the sum of all entries, the trace."""
    return float(sum(f.sum(dtype=torch.float64) for f in fisher.values()))
