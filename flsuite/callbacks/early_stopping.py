"""Early stopping of a federation."""

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from flsuite.callbacks.base import Affects, FederationCallback, require_validation
from flsuite.common.arguments import NonNegativeFloat, PositiveInt, Settings
from flsuite.common.messages import Scores
from flsuite.common.score_names import lower_is_better, require_score, score_name
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.run import Run

log = logging.getLogger("flsuite")


@dataclass(eq=False)
class RoundEarlyStopping(FederationCallback, Settings):
    """Stops when a score on validation data has not improved for a number of evaluations.

    A stopped run can be extended: resume it with more patience, or without the callback.

    Args:
        monitor: ``accuracy``, ``f1_macro``, ``balanced_accuracy``, ``auroc`` or ``loss`` of the
            global model, or a number that the model logs itself.
        patience: Evaluations without improvement before the run stops.
        min_delta: The smallest change that counts as an improvement.
    """

    affects: ClassVar[Affects] = "rounds"

    monitor: str = "accuracy"
    patience: PositiveInt = 10
    min_delta: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_score("RoundEarlyStopping", monitor=self.monitor)
        self.best: float | None = None
        self.waited = 0

    @property
    def state_key(self) -> str:
        """Return a key that distinguishes two of these callbacks and ignores the patience."""
        return self._generate_state_key(monitor=self.monitor)

    def on_federation_start(self, run: Run) -> None:
        require_validation(run, "RoundEarlyStopping")
        if run.round == 0:
            self.best, self.waited = None, 0
        # A resumed run that had stopped stops again, unless its patience has grown.
        elif self.waited >= self.patience:
            run.stop()

    def on_evaluation_end(self, run: Run, round: int, split: str, scores: Scores) -> None:
        if split != "val":
            return
        # The sign makes larger values better, also for a loss.
        sign = -1 if lower_is_better(self.monitor) else 1
        value = scores[GLOBAL].get(score_name(self.monitor), math.nan) * sign
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
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.waited = state_dict["best"], state_dict["waited"]
