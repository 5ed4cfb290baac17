"""What an engine is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from flsuite.client.runner import WorkerSetup
from flsuite.messages import ClientFailure, ClientResult, FitRequest

__all__ = ["Engine", "Outcome"]

Outcome = ClientResult | ClientFailure


class Engine(ABC):
    """Says where clients train. It never decides what comes out: the same work gives the same results on any engine."""

    @abstractmethod
    def start(self, job: WorkerSetup) -> None:
        """Get ready to train clients of this job."""

    @abstractmethod
    def run(self, works: Sequence[FitRequest]) -> Iterator[Outcome]:
        """Train, and yield what came of each work in the order given, holding few outcomes at a time."""

    def stop(self) -> None:
        """Give back what :meth:`start` took. Safe to call twice."""
        return
