"""What engines with a pool of workers have in common."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from flsuite.engines.backlog import Backlog
from flsuite.engines.base import Engine
from flsuite.messages import ClientFailure, FitRequest, OwnScores, ScoreRequest

__all__ = ["Pool"]

_SCORES_AHEAD = 4  # per worker: bounds the clients' models in memory


class Pool(Engine):
    """An engine that hands jobs from a backlog to workers."""

    can_score: ClassVar[bool] = True
    _backlog: Backlog

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._backlog.submit(self.jobs(requests, self._sums_parts()))
        self._hand_out()

    @property
    def pending(self) -> Sequence[int]:
        return self._backlog.pending

    def collect(self, number: int) -> Any:
        while not self._backlog.has_answer(number):
            self._backlog.move_up(number)
            self._hand_out(urgent=number)
            self._wait()
        return self._backlog.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> list[OwnScores | ClientFailure | None]:
        scored: list[Any] = []
        waiting: deque[int] = deque()
        for request in requests:
            self._backlog.submit([[request]])
            self._hand_out()
            waiting.append(request.number)
            if len(waiting) > _SCORES_AHEAD * self._workers():
                scored.append(self.collect(waiting.popleft()))
        return [*scored, *map(self.collect, waiting)]

    @abstractmethod
    def _sums_parts(self) -> bool:
        """Return whether a worker may train a part of the cohort in one go."""

    @abstractmethod
    def _workers(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    def _hand_out(self, urgent: int | None = None) -> None:
        """Give idle workers their next jobs.

        That of the urgent request is handed out even when many outcomes wait for their turn.
        """

    @abstractmethod
    def _wait(self) -> None:
        """Wait until a worker has answered or died, and take note of it."""
