"""Interfaces for schedules: clock, fits, speeds, availability, and the schedule itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from flsuite.aggregators.part import Capability
from flsuite.common.messages import ClientUpdate, Fault, FitRequest, Outcome
from flsuite.federation.engines.base import Engine
from flsuite.metrics.privacy import RandomDraw


@dataclass
class Clock:
    """The progress of a run: rounds, virtual seconds, and the work done so far.

    Virtual time is the time that the run would take if every client had its own machine.

    Attributes:
        round: Number of aggregations so far, which is also the version of the global model.
        seconds: Virtual seconds since the start of the run.
        client_updates: Client updates aggregated so far.
        bytes: Bytes sent and received by clients, including clients that never answered.
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
        repeat: Number of earlier fits that the client started from this version.
        started: Virtual seconds at its start.
        ended: Virtual seconds at which its update arrives, or at which it drops out or is left out.
            ``None`` while unknown.
        outcome: ``arrived``, ``dropped`` (the client dropped out, and its update never arrives),
            ``late`` (the round ended without it) or ``absent`` (the client is not part of the run;
            its place stays empty for as long as the fit would have taken).
        fault: The fault to inject. Default: none.
        samples: Training samples that the client processes, over all local epochs.
        bytes_down: Bytes that the client receives.
        bytes_up: Bytes that the client sends.
    """

    number: int
    client: int
    version: int
    repeat: int
    started: float
    ended: float | None = None
    outcome: Literal["arrived", "dropped", "late", "absent"] = "arrived"
    fault: Fault | None = None
    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


Work = Fit  # its name in plugins that were written for version 0.2


class Speeds(ABC):
    """Determines how long a fit takes on the virtual clock.

    The duration is a function of the run's seed and of the fit: its number, client, start, samples
    and bytes. It never depends on the machine or on the order of calls.

    Attributes:
        is_measured: Whether durations are measured while clients train, and not known before.
    """

    is_measured: ClassVar[bool] = False

    def configure(self, clients: int, seed: int) -> None:
        """Prepare for a run with ``clients`` clients and this seed."""
        return

    @abstractmethod
    def seconds(self, fit: Fit) -> float | None:
        """Return the virtual seconds of a fit, or ``None`` if they must be measured."""


class Measured(Speeds):
    """Measures the wall time of fits on this machine.

    Take it to time fits on this machine, not to compare methods.

    Durations differ from run to run, and so does every result that depends on them.
    """

    is_measured = True

    def seconds(self, fit: Fit) -> float | None:
        return None


class Availability(ABC):  # noqa: B024  (every hook has a default)
    """Determines which clients can start a fit, and which drop out of one.

    A client that drops out keeps nothing of that fit, and the server never hears from it.

    All methods are functions of the run's seed, the virtual time, the client and the number of the
    fit.
    """

    def configure(self, clients: int, seed: int) -> None:
        """Prepare for a run with ``clients`` clients and this seed."""
        return

    def available(self, seconds: float) -> np.ndarray | None:
        """Return which clients can start a fit at this virtual time, bool ``(clients,)``.

        ``None`` means all clients, so a large federation does not need an array.
        """
        return None

    def next_start(self, seconds: float) -> float | None:
        """Return the first virtual time after this one at which a client becomes available.

        ``None`` means never.
        """
        return None

    def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
        """Return the virtual time at which a client drops out of a fit, or ``None``.

        Args:
            client: The client's number.
            number: Number of the fit in the run, from 0.
            started: Virtual seconds at the start of the fit.
            seconds: Virtual seconds of the complete fit, 0 if they are measured.
        """
        return None


class Always(Availability):
    """All clients are always available, and none drops out.

    Take it unless availability matters: it is the default.
    """


MakeRequests = Callable[[Sequence[Fit]], list[FitRequest]]
"""Turns fits into requests, see :meth:`flsuite.runs.run.Run.requests`."""

Amounts = Callable[[int], tuple[int, int, int]]
"""Returns the samples, bytes down and bytes up of a client's next fit."""


class Schedule(ABC):
    """Decides who trains when.

    The federation asks twice per aggregation: which clients start now, and whose outcomes arrive
    next. A synchronous schedule starts a cohort and waits for all of it. An asynchronous schedule
    starts a client whenever another one comes back, and waits for the next outcome, or the next
    few, on the virtual clock. Neither depends on the engine or on the order in which fits finish.

    Other parts of a run depend on its attributes. They are complete after :meth:`configure`.

    Attributes:
        is_asynchronous: Whether clients may come back to a newer version than they started from.
        is_virtual: Whether the times are known without training.
        may_lose: Whether a client that starts may never come back.
        may_be_empty: Whether a round may have no clients at all. The change of such a round is 0.
        faults: The kinds of injected faults.
        cohort: Number of clients that a round starts. 0 if there are no rounds.
        at_once: About how many fits of one aggregation can train at the same time. 0 if unknown.
        expected_updates: Number of updates that an aggregation waits for, if no client is lost. 0
            if unknown.
        sees_updates: Whether cohorts depend on what clients have sent.
        draws_by_size: Whether clients with more samples are drawn more often.
        client_sampling: How cohorts are drawn. ``None`` unless the draw is random and depends only
            on the seed. Differential-privacy guarantees rely on it.
    """

    is_asynchronous: bool = False
    is_virtual: bool = False
    may_lose: bool = False
    may_be_empty: bool = False
    faults: tuple[Fault, ...] = ()
    cohort: int = 0
    at_once: int = 0
    expected_updates: int = 0
    sees_updates: bool = False
    draws_by_size: bool = False
    client_sampling: RandomDraw | None = None

    @property
    def needs(self) -> frozenset[Capability]:
        """Return what the schedule requires, see :class:`flsuite.aggregators.Part`."""
        needs: set[Capability] = set()
        if self.is_virtual or self.may_lose or self.may_be_empty or self.sees_updates:
            needs.add("clients")
        if "gone" in self.faults:
            needs.add("secure aggregation")
        if "dies" in self.faults:
            needs.add("worker processes")
        if "hangs" in self.faults:
            needs.add("a timeout of fits")
        return frozenset(needs)

    @property
    def withholds(self) -> dict[Capability, str]:
        """Return what the schedule does not provide to the algorithm, with the reasons."""
        withheld: dict[Capability, str] = {}
        if self.is_asynchronous:
            withheld["current models"] = (
                "brings models of older versions; set trainer.schedule to Synchronous, or "
                "trainer.aggregator to FedBuff without trainer.secure_sum"
            )
            withheld["rounds"] = (
                "has none; set trainer.engine.workers to 1, or trainer.engine to Processes"
            )
        if self.is_asynchronous and not self.is_virtual:
            withheld["durations known in advance"] = (
                "measures them; give trainer.schedule.speeds other ones than Measured, or set "
                "trainer.engine to Processes"
            )
        if self.may_be_empty:
            withheld["a cohort of known size"] = (
                "draws cohorts of any size; set trainer.schedule.sampling to uniform"
            )
        if self.draws_by_size:
            withheld["equal chances"] = (
                "draws large clients more often, so that weights by samples count size twice; set "
                "trainer.aggregator.weighting or trainer.schedule.sampling to uniform"
            )
        if self.client_sampling is None:
            withheld["random cohorts"] = (
                "draws them by data, speed or availability; set trainer.schedule to Synchronous "
                "with sampling uniform or poisson, without over_selection, deadline and "
                "availability"
            )
        return withheld

    @abstractmethod
    def configure(
        self,
        sizes: Sequence[int],
        seed: int,
        work: Amounts | None = None,
        absent: Collection[int] = (),
    ) -> None:
        """Prepare for a run. Called once before the first round.

        Args:
            sizes: Training samples of each client.
            seed: The run's seed.
            work: Returns the samples and bytes of a fit. Default: one pass over the samples, and no
                bytes.
            absent: Clients that are drawn like all others but never train, so that all others train
                when and as they would with them.

        Raises:
            FlsuiteError: If these clients cannot satisfy the settings.
        """

    @property
    def ended(self) -> Sequence[Fit]:
        """Return the fits that have ended since the round began, in order."""
        return ()

    @property
    def in_flight(self) -> Sequence[Fit]:
        """Return the fits that have started but not ended."""
        return ()

    @abstractmethod
    def start(self, clock: Clock) -> list[Fit]:
        """Return the fits to train that start now, from the current version.

        They are in ascending order of client. A client that is known to drop out is excluded,
        because it does not have to train. After a resume, the first call also returns the fits in
        flight.
        """

    @abstractmethod
    def arrivals(self, engine: Engine, clock: Clock, requests: MakeRequests) -> Iterator[Outcome]:
        """Yield the outcomes that the next aggregation waits for, in a fixed order.

        At the end, the clock shows the virtual time of the aggregation.

        Args:
            engine: Trains the clients.
            clock: The clock, advanced from event to event.
            requests: Returns the requests of clients that start in between.
        """

    def accepted(self, update: ClientUpdate) -> None:
        """Register an update as valid. Called before the next outcome is requested."""
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics of the current round, for the log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return
