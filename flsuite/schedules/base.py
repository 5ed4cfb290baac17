"""The interfaces of a schedule: the clock, a fit on it, who trains when, and for how long."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flsuite.aggregators.part import Capability
from flsuite.engines.base import Engine
from flsuite.messages import Fault, FitRequest, Outcome
from flsuite.metrics.privacy import RandomDraw


@dataclass
class Clock:
    """The time of a run: rounds, virtual seconds, and the work done so far.

    Virtual time is what the run would take if every client had a machine of its own.

    Attributes:
        round: Aggregations done, which is also the version of the global model.
        seconds: Virtual seconds since the start of the run.
        client_updates: Client updates that have been aggregated.
        bytes: Bytes that clients have sent and received, those that never answered included.
    """

    round: int = 0
    seconds: float = 0.0
    client_updates: int = 0
    bytes: int = 0


@dataclass
class Fit:
    """One fit of one client on the virtual clock.

    Attributes:
        number: Number of the fit in the run, from 0.
        client: The client's number.
        version: Version of the global model that it starts from.
        repeat: Fits that the client has started from this version before.
        started: Virtual seconds at its start.
        ended: Virtual seconds at which its update arrives, or at which it drops out or is left out.
            ``None`` until it is known.
        outcome: ``arrived``, ``dropped`` (the client dropped out, and its update never arrives) or
            ``late`` (the round ended without it).
        fault: How it fails on purpose. Default: not at all.
    """

    number: int
    client: int
    version: int
    repeat: int
    started: float
    ended: float | None = None
    outcome: Literal["arrived", "dropped", "late"] = "arrived"
    fault: Fault | None = None


@dataclass(frozen=True)
class Declarations:
    """What a schedule declares about itself, on which other parts of a run depend.

    Attributes:
        name: The schedule's name in errors.
        is_asynchronous: Whether clients may come back to a newer version than they started from.
        is_virtual: Whether the times are known without training.
        may_lose: Whether a client that starts may never come back.
        may_be_empty: Whether a round may have no client at all. The change of such a round is 0.
        faults: How clients fail on purpose.
        cohort: Clients that a round starts. It is 0 where there are no rounds.
        expected_updates: Updates that an aggregation waits for, if no client is lost. It is 0 where
            that is not known.
        client_sampling: How cohorts are drawn. It is ``None`` unless they are a random choice that
            depends on the seed alone. A guarantee of differential privacy rests on it.
    """

    name: str
    is_asynchronous: bool = False
    is_virtual: bool = False
    may_lose: bool = False
    may_be_empty: bool = False
    faults: tuple[Fault, ...] = ()
    cohort: int = 0
    expected_updates: int = 0
    client_sampling: RandomDraw | None = None

    @property
    def needs(self) -> frozenset[Capability]:
        """Return what it needs of the algorithm, see :class:`flsuite.aggregators.Part`."""
        needs: set[Capability] = set()
        if self.is_virtual or self.may_lose or self.may_be_empty:
            needs.add("clients")
        if "gone" in self.faults:
            needs.add("secure aggregation")
        return frozenset(needs)

    @property
    def withholds(self) -> dict[Capability, str]:
        """Return what the algorithm does not get under this schedule, with the reasons."""
        withheld: dict[Capability, str] = {}
        if self.is_asynchronous:
            withheld["current models"] = "brings those of older versions"
        if self.may_be_empty:
            withheld["a cohort of known size"] = "draws cohorts of any size"
        if self.client_sampling is None:
            withheld["random cohorts"] = "draws them by data, speed or availability"
        return withheld


@dataclass(frozen=True)
class Work:
    """The work of one fit.

    Attributes:
        client: The client's number.
        number: Number of the fit in the run, from 0.
        started: Virtual seconds at its start.
        samples: Training samples that the client processes, over all local epochs.
        bytes_down: Bytes that the client receives.
        bytes_up: Bytes that the client sends.
    """

    client: int
    number: int
    started: float
    samples: int
    bytes_down: int
    bytes_up: int


class Speeds(ABC):
    """Says how long a fit takes on the virtual clock.

    The answer is a function of the run's seed and of the work, never of the machine or of the order
    of calls.
    """

    def configure(self, clients: int, seed: int) -> None:
        """Prepare for a run with this number of clients and this seed."""
        return

    @abstractmethod
    def seconds(self, work: Work) -> float | None:
        """Return the virtual seconds of a fit, or ``None`` if they must be measured."""


class Measured(Speeds):
    """The seconds that the fit takes on this machine.

    They differ from run to run, and so does everything that depends on them.
    """

    def seconds(self, work: Work) -> float | None:
        return None


class Availability(ABC):  # noqa: B024  (every hook has a default)
    """Says which clients can start a fit, and which drop out of one.

    A client that drops out keeps nothing of that fit, and the server never hears of it.

    The answers are functions of the run's seed, the virtual time, the client and the number of the
    fit.
    """

    def configure(self, clients: int, seed: int) -> None:
        """Prepare for a run with this number of clients and this seed."""
        return

    def available(self, seconds: float) -> np.ndarray | None:
        """Return which clients can start a fit at this virtual time, bool ``(clients,)``.

        ``None`` stands for all clients, so that a large federation needs no array.
        """
        return None

    def next_start(self, seconds: float) -> float | None:
        """Return the first virtual time after this one at which a client becomes available.

        ``None`` means never.
        """
        return None

    def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
        """Return the virtual time at which a client drops out of a fit, ``None`` if it does not.

        Args:
            client: The client's number.
            number: Number of the fit in the run, from 0.
            started: Virtual seconds at the start of the fit.
            seconds: Virtual seconds that the whole fit would take, 0 if they are measured.
        """
        return None


class Always(Availability):
    """All clients are available at any time, and none drops out."""


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
        declarations: What other parts of a run depend on. It is complete after :meth:`configure`.
    """

    declarations: Declarations

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

    @property
    def ended(self) -> Sequence[Fit]:
        """Return the fits that have ended since the round began, in their order."""
        return ()

    @property
    def in_flight(self) -> Sequence[Fit]:
        """Return the fits that have started and not ended."""
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

    def metrics(self) -> dict[str, float]:
        """Return metrics of the round in progress, for the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what must be known to resume, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return
