"""The interface of a schedule."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flsuite.engines.base import Engine
from flsuite.messages import FitRequest, Outcome
from flsuite.metrics.privacy import RandomDraw
from flsuite.schedules.clock import Clock
from flsuite.schedules.fit import Fit
from flsuite.schedules.speeds import Work

__all__ = ["MakeRequests", "MakeWork", "Schedule"]

MakeRequests = Callable[[Sequence[Fit]], list[FitRequest]]
"""Turns fits into requests, see :meth:`flsuite.runs.run.Run.requests`."""

MakeWork = Callable[[int, int, float], Work]
"""Returns the work of a fit, given the client, the number of the fit and its start."""


class Schedule(ABC):
    """Says who trains when.

    The federation asks twice per aggregation: who starts now, and whose outcomes arrive next. A
    synchronous round starts a cohort and waits for all of it. An asynchronous schedule starts a
    client where another one has come back, and waits for the next outcome, or the next few, by the
    virtual clock. Neither depends on the engine or on the order in which fits finish.

    Attributes:
        is_asynchronous: Whether clients may come back to a newer version than they started from.
        is_virtual: Whether the times are known without training.
        may_lose: Whether a client that starts may never come back.
        may_be_empty: Whether a round may have no client at all. The change of such a round is 0.
        ended: Fits that have ended since the round began, in their order.
        in_flight: Fits that have started and not ended.
        cohort: Clients that a round starts, after :meth:`configure`. It is 0 where there are no
            rounds.
        awaited: Updates that an aggregation waits for, after :meth:`configure`, if no client is
            lost. It is 0 where that is not known.
    """

    is_asynchronous: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """Return what it needs of the algorithm, see :class:`flsuite.aggregators.Part`."""
        waits = self.is_virtual or self.may_lose or self.may_be_empty
        return frozenset({"clients"}) if waits else frozenset()

    @property
    def withholds(self) -> dict[str, str]:
        """Return what the algorithm does not get under this schedule, with the reasons."""
        withheld = {}
        if self.is_asynchronous:
            withheld["current models"] = "brings those of older versions"
        if self.may_be_empty:
            withheld["a cohort of known size"] = "draws cohorts of any size"
        if self.client_sampling is None:
            withheld["random cohorts"] = "draws them by data, speed or availability"
        return withheld

    @abstractmethod
    def configure(self, sizes: Sequence[int], seed: int, work: MakeWork | None = None) -> None:
        """Prepare for a run.

        It is called once before the first round.

        Args:
            sizes: Training samples of each client.
            seed: The run's seed.
            work: Returns the work of a fit. Default: one pass over the samples, and no bytes.

        Raises:
            FlsuiteError: If the settings cannot be met with these clients.
        """

    def require(self, engine: Engine) -> None:
        """Refuse an engine on which the run cannot go as the schedule says.

        Raises:
            FlsuiteError: If it cannot.
        """
        return

    @property
    def is_virtual(self) -> bool:
        return False

    @property
    def may_lose(self) -> bool:
        return False

    @property
    def may_be_empty(self) -> bool:
        return False

    @property
    def client_sampling(self) -> RandomDraw | None:
        """Return how cohorts are drawn, after :meth:`configure`.

        It is ``None`` unless they are a random choice that depends on the seed alone. A guarantee
        of differential privacy rests on it.
        """
        return None

    @property
    def ended(self) -> Sequence[Fit]:
        return ()

    @property
    def in_flight(self) -> Sequence[Fit]:
        return ()

    @abstractmethod
    def start(self, clock: Clock) -> list[Fit]:
        """Return the fits to be trained that start now, from the current version.

        They are ascending by client. A client that is known to drop out is not among them: it does
        not have to train. After a resume, the first call returns the fits in flight too.
        """

    @abstractmethod
    def arrivals(self, engine: Engine, clock: Clock, requests: MakeRequests) -> Iterator[Outcome]:
        """Yield the outcomes that the next aggregation waits for, in their order.

        At the end, the clock is at the virtual time of the aggregation.

        Args:
            engine: Trains the clients.
            clock: It is moved on from event to event.
            requests: Returns the requests of clients that start in between.
        """

    def accepted(self, number: int) -> None:
        """Take note that the update of a fit is good, before the next outcome is asked for."""
        return

    @property
    def cohort(self) -> int:
        return 0

    @property
    def awaited(self) -> int:
        return 0

    def numbers(self) -> dict[str, float]:
        """Return numbers about the round in progress, for the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what must be known to resume, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return
