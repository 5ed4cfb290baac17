"""Callbacks that stop a run."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.arguments import NonNegativeFloat, PositiveInt, Range, Settings
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.messages import Scores
from flsuite.common.score_names import lower_is_better, require_score, score_name
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.run import Run


class _Stopping(FederationCallback, Settings, ABC):
    """Stops a run by its scores on validation data. The run can be extended, and then resumed."""

    affects: ClassVar[Affects] = "rounds"

    def on_federation_start(self, run: Run) -> None:
        if run.evaluator.at(run.federation.data.at(run.round)).samples("val") is None:
            raise FlsuiteError(
                f"{type(self).__name__} stops by a score on validation data, and there is none: "
                "set data.val_fraction above 0, let the validation_step of the model return a "
                "loss, or remove the callback"
            )
        if run.round == 0:
            self.load_state_dict({})
        elif self.has_stopped():  # not if its limit is now harder to reach
            run.stop()

    @abstractmethod
    def has_stopped(self) -> bool:
        """Return whether the scores so far meet the condition to stop."""


@dataclass(eq=False)
class StopAt(_Stopping):
    """Stops when a score on validation data reaches a value.

    Take it to measure how long a method takes to a target.

    ``trainer.max_virtual_seconds`` and ``trainer.max_client_updates`` limit a run that never
    reaches it. A stopped run can be extended: resume it with another value or without the callback.

    Args:
        metric: ``accuracy``, ``f1_macro``, ``balanced_accuracy``, ``auroc`` or ``loss`` of the
            global model.
        value: The target. A loss must fall to it, and every other score must rise to it.

    Attributes:
        reached: The score that reached the target.
        round: The round of that score.
    """

    metric: str = "accuracy"
    value: Annotated[float, Range("a finite number", math.isfinite)] = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require_score("StopAt", metric=self.metric)
        self.reached: float | None = None
        self.round: int | None = None

    @property
    def state_key(self) -> str:
        """Return a key that does not depend on the target."""
        return self._generate_state_key(metric=self.metric)

    def has_stopped(self) -> bool:
        return self._is_reached(self.reached)

    def on_evaluation_end(self, run: Run, round: int, split: str, scores: Scores) -> None:
        score = scores[GLOBAL].get(score_name(self.metric))
        if split != "val" or not self._is_reached(score):
            return
        self.reached, self.round = score, round
        log.info(
            "validation %s %.4f has reached the target %g: stopping after round %d, at virtual "
            "second %.1f and client update %d",
            self.metric,
            score,
            self.value,
            round,
            run.federation.clock.seconds,
            run.federation.clock.client_updates,
        )
        run.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self.reached, "round": self.round}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reached, self.round = state_dict.get("reached"), state_dict.get("round")

    def _is_reached(self, score: float | None) -> bool:
        """Return whether a score on validation data is at or beyond the target."""
        if score is None or math.isnan(score):
            return False
        return score <= self.value if lower_is_better(self.metric) else score >= self.value


@dataclass(eq=False)
class RoundEarlyStopping(_Stopping):
    """Stops when a score on validation data has not improved for a number of evaluations.

    Take it to end a run that no longer improves.

    A stopped run can be extended: resume it with more patience, or without the callback.

    Args:
        monitor: ``accuracy``, ``f1_macro``, ``balanced_accuracy``, ``auroc`` or ``loss`` of the
            global model, or a number that the model logs itself.
        patience: Evaluations without improvement before the run stops.
        min_delta: The smallest change that counts as an improvement.
    """

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

    def has_stopped(self) -> bool:
        return self.waited >= self.patience

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
        if self.has_stopped():
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
        self.best, self.waited = state_dict.get("best"), state_dict.get("waited", 0)
