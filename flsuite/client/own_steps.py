"""Scores of a model by its own ``validation_step`` and ``test_step``, in Lightning's own loop."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from flsuite.client.resident import Resident
from flsuite.client.trainer import quiet_lightning
from flsuite.data.loader import SplitLoader
from flsuite.errors import FlsuiteError
from flsuite.lightning_internals import make_slim
from flsuite.messages import Split
from flsuite.metrics import score_name
from flsuite.models.modes import kept_modes
from flsuite.models.traits import has_step

_SCORING_ARGUMENTS = (  # arguments of Lightning's Trainer that decide how a model is scored
    "accelerator",
    "benchmark",
    "deterministic",
    "devices",
    "inference_mode",
    "plugins",
    "precision",
    "strategy",
)


class OwnSteps:
    """Runs a model's own steps, and returns what they log.

    Lightning reduces the logged numbers as it always does: a mean over batches weighted by their
    sizes, a metric's own reduction, or what the model's hooks make of them.

    Args:
        model: The resident model.
        trainer_kwargs: Arguments of each client's Lightning Trainer.

    Attributes:
        names: The names of all numbers that were logged, in their order, as keys.
    """

    def __init__(self, model: LightningModule, trainer_kwargs: Mapping[str, Any]) -> None:
        self.model = model
        self._kwargs = {k: v for k, v in trainer_kwargs.items() if k in _SCORING_ARGUMENTS}
        self._trainer: Trainer | None = None
        self.names: dict[str, None] = {}

    def metrics(self, split: Split, batches: SplitLoader) -> dict[str, float]:
        """Return what the step logs, with names that are the same for both splits.

        Args:
            split: ``test`` takes ``test_step``, and ``val`` takes ``validation_step``. A model
                that lacks the one takes the other.
            batches: The samples.

        Raises:
            FlsuiteError: If the step logs nothing.
        """
        trainer, step = self._started_trainer(), self._step(split)
        run = trainer.test if step == "test_step" else trainer.validate
        # Neither modes nor what a step collects must reach the next fit.
        resident = Resident(self.model)
        with kept_modes(self.model):
            run(self.model, dataloaders=batches, verbose=False)
        resident.restore()

        logged = {score_name(k): float(v) for k, v in trainer.callback_metrics.items()}
        if not logged:
            raise FlsuiteError(
                f"model: {step} of {type(self.model).__name__} logs nothing to score by; call "
                "self.log in it"
            )
        self.names.update(dict.fromkeys(logged))
        # A number that is not defined on these samples is left out, as in the suite's own scores.
        return {name: value for name, value in logged.items() if not math.isnan(value)}

    def _step(self, split: Split) -> str:
        own, other = "test_step", "validation_step"
        if split == "val":
            own, other = other, own
        return own if has_step(self.model, own) else other

    def _started_trainer(self) -> Trainer:
        if self._trainer is None:
            quiet_lightning()
            self._trainer = Trainer(
                **self._kwargs,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            make_slim(self._trainer)
        return self._trainer
