"""The interface of an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import ClassVar

from flsuite.client.setup import WorkerSetup
from flsuite.messages import ClientFailure, Fault, FitRequest, Outcome, OwnScores, ScoreRequest

__all__ = ["Engine"]


class Engine(ABC):
    """Says where clients train.

    The engine has no influence on results. The same requests give the same outcomes on every
    engine, in any order of collection.

    Attributes:
        can_score: Whether it scores several models at a time.
    """

    can_score: ClassVar[bool] = False

    @contextmanager
    def running(self, setup: WorkerSetup) -> Iterator[None]:
        """Start the engine, and stop it at the end, also after an error."""
        self.start(setup)
        try:
            yield
        finally:
            self.stop()

    @abstractmethod
    def start(self, setup: WorkerSetup) -> None:
        """Get ready to train the clients of this run."""

    @abstractmethod
    def submit(self, requests: Iterable[FitRequest]) -> None:
        """Queue fits. They may train ahead of their collection, within bounded memory."""

    @property
    @abstractmethod
    def pending(self) -> Sequence[int]:
        """Return the numbers of the uncollected requests, in the order of submission."""

    @abstractmethod
    def collect(self, number: int) -> Outcome:
        """Wait for the outcome of one pending request, and forget the request.

        Raises:
            FlsuiteError: If no client can train with the settings of the run.
        """

    def score(self, requests: Iterable[ScoreRequest]) -> list[OwnScores | ClientFailure | None]:
        """Score clients' own models, if :attr:`can_score`, and return their scores in this order.

        A client has ``None`` where there is no such split. Fits that are pending stay so.
        """
        raise NotImplementedError

    @property
    def survives(self) -> frozenset[Fault]:
        """Return the faults on purpose that cost this engine one client, and not the run."""
        return frozenset({"raises", "nan", "shapes", "late", "twice", "gone"})

    @staticmethod
    def jobs(requests: Iterable[FitRequest], sums_parts: bool) -> Iterator[list[FitRequest]]:
        """Yield what one worker trains at a time: a part of the cohort, or one client.

        Args:
            requests: The requests, those of one part next to each other.
            sums_parts: Whether a worker is to add up the models of a part.
        """
        for part, members in groupby(requests, key=lambda request: request.part):
            if sums_parts and part is not None:
                yield list(members)
            else:
                yield from ([request] for request in members)

    def stop(self) -> None:
        """Release what :meth:`start` took, and drop pending requests.

        It may be called twice.
        """
        return
