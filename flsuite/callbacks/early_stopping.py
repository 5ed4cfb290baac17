"""Stopping a federation that has stopped learning."""

import logging
import math
from typing import TYPE_CHECKING, Any

from flsuite.callbacks.base import FederationCallback
from flsuite.errors import FlsuiteError
from flsuite.metrics import HIGHER_IS_BETTER

if TYPE_CHECKING:
    from flsuite.server.evaluation import Scores
    from flsuite.trainer import FederatedTrainer

__all__ = ["RoundEarlyStopping"]

log = logging.getLogger("flsuite")


class RoundEarlyStopping(FederationCallback):
    """Stop when a score on validation data has not improved for a number of evaluations.

    Args:
        monitor: ``accuracy``, ``f1_macro``, ``balanced_accuracy``, ``auroc`` or ``loss`` of the global model.
        patience: Evaluations without improvement.
        min_delta: What counts as one.
    """

    def __init__(
        self, monitor: str = "accuracy", patience: int = 10, min_delta: float = 0.0
    ) -> None:
        if monitor not in HIGHER_IS_BETTER:
            raise FlsuiteError(
                f"RoundEarlyStopping: monitor must be one of {', '.join(HIGHER_IS_BETTER)}, got {monitor}"
            )
        if patience < 1:
            raise FlsuiteError(f"RoundEarlyStopping: patience must be at least 1, got {patience}")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.waited = 0

    def on_federation_start(self, trainer: "FederatedTrainer") -> None:
        if trainer.round == 0:
            self.best, self.waited = None, 0

    def on_evaluation_end(
        self, trainer: "FederatedTrainer", round: int, split: str, scores: "Scores"
    ) -> None:
        if split != "val":
            return
        value = scores["global"].get(self.monitor, math.nan) * (
            1 if HIGHER_IS_BETTER[self.monitor] else -1
        )
        if not math.isnan(value) and (self.best is None or value > self.best + self.min_delta):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            log.info(
                "validation %s has not improved for %d evaluations: stopping after round %d",
                self.monitor,
                self.waited,
                round,
            )
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited = state_dict["best"], state_dict["waited"]
