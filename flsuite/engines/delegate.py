"""Base of engines that leave the work to another engine."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from flsuite.client.setup import WorkerSetup
from flsuite.engines.base import Engine
from flsuite.messages import Fault, FitRequest, Outcome, ScoreRequest


class Delegate(Engine):
    """An engine that leaves the work to ``_engine``."""

    _engine: Engine

    def start(self, setup: WorkerSetup) -> None:
        self._engine.start(setup)

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._engine.submit(requests)

    @property
    def joins(self) -> bool:
        return self._engine.joins

    def join(self, numbers: Collection[int]) -> None:
        self._engine.join(numbers)

    @property
    def pending(self) -> Sequence[int]:
        return self._engine.pending

    def collect(self, number: int) -> Outcome:
        return self._engine.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> Any:
        return self._engine.score(requests)

    @property
    def survives(self) -> frozenset[Fault]:
        return self._engine.survives

    def stop(self) -> None:
        self._engine.stop()
