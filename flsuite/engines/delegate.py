"""Base of engines that leave the work to another engine."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from flsuite.client.setup import WorkerSetup
from flsuite.engines.base import Engine, EngineDeclarations
from flsuite.messages import FitRequest, Outcome, ScoreRequest


class Delegate(Engine):
    """An engine that leaves the work to ``_engine``."""

    _engine: Engine

    @property
    def declarations(self) -> EngineDeclarations:
        return self._engine.declarations

    def start(self, setup: WorkerSetup) -> None:
        self._engine.start(setup)

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._engine.submit(requests)

    def join(self, numbers: Collection[int]) -> None:
        self._engine.join(numbers)

    @property
    def pending(self) -> Sequence[int]:
        return self._engine.pending

    def collect(self, number: int) -> Outcome:
        return self._engine.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> Any:
        return self._engine.score(requests)

    def stop(self) -> None:
        self._engine.stop()
