"""Asynchronous schedule: a new client starts whenever another one comes back."""

import copy
import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from flsuite.common.arguments import PositiveFloat, PositiveInt, Settings
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientUpdate, Outcome
from flsuite.federation.engines.base import Engine
from flsuite.federation.schedules.base import (
    Amounts,
    Availability,
    Clock,
    Fit,
    MakeRequests,
    Schedule,
    Speeds,
)
from flsuite.federation.schedules.launcher import Launcher
from flsuite.federation.schedules.speeds import Stragglers

_MOST_LOST = 1000  # fits lost in a row, per concurrent client, before giving up


@dataclass
class Asynchronous(Schedule, Settings):
    """FedBuff's schedule (Nguyen et al. 2022, arXiv:2106.06639, algorithm 1).

    Take it if the server should not wait for slow clients.

    A fixed number of clients trains at any moment. When one comes back or drops out, another one
    starts at once, drawn uniformly from the idle and available clients. With ``buffer_size`` 1,
    this is the schedule of FedAsync (Xie et al. 2019, arXiv:1903.03934).

    Events at the same virtual time are ordered: arrivals before starts, and arrivals by the start
    of their fit, then by client. The order affects the result.

    Args:
        concurrency: Number of clients that train at any moment.
        buffer_size: Updates per aggregation. A round is one aggregation.
        buffer_timeout: Virtual seconds after a buffer's first update at which the buffer is
            aggregated even if it is not full. Default: wait until it is full.
        speeds: How long fits take. Default: :class:`Stragglers` with its defaults.
        availability: Which clients can train, and which drop out. Default: all clients, always.
    """

    concurrency: PositiveInt = 10
    buffer_size: PositiveInt = 1
    buffer_timeout: PositiveFloat | None = None
    speeds: Speeds | None = None
    availability: Availability | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.is_asynchronous = True
        self.is_virtual = self.speeds is None or not self.speeds.is_measured
        self.may_lose = self.availability is not None
        # An estimate: the other fits start only after some of these have come back.
        self.at_once = math.ceil(min(self.concurrency, self.buffer_size) / 2)
        self.expected_updates = self.buffer_size
        if self.buffer_size > self.concurrency and self.buffer_timeout is None:
            raise FlsuiteError(
                f"Asynchronous: buffer_size {self.buffer_size} is above concurrency "
                f"{self.concurrency}, so that a buffer would wait for clients that start after "
                "others have come back; lower buffer_size, raise concurrency, or set buffer_timeout"
            )

    def configure(
        self,
        sizes: Sequence[int],
        seed: int,
        work: Amounts | None = None,
        absent: Collection[int] = (),
    ) -> None:
        self._absent = absent
        if self.concurrency > len(sizes):
            raise FlsuiteError(
                f"Asynchronous: concurrency {self.concurrency} is above the number of clients, "
                f"{len(sizes)}; a client trains once at a time: lower concurrency"
            )
        speeds = self.speeds or Stragglers()
        self._launcher = Launcher(speeds, self.availability, sizes, seed, work)
        self._flights = _Flights()
        self._resumed: list[Fit] = []
        self._ended: list[Fit] = []
        self._round, self._draws = -1, 0
        self._buffer: set[int] = set()  # numbers of fits

    @property
    def ended(self) -> Sequence[Fit]:
        return self._ended

    @property
    def in_flight(self) -> Sequence[Fit]:
        return self._flights.all

    def start(self, clock: Clock) -> list[Fit]:
        """Start clients until ``concurrency`` of them are in flight.

        No client starts while another arrival is due at the same time.
        """
        if clock.round != self._round:
            self._round, self._ended, self._draws = clock.round, [], 0
        # After a resume, the engine must train the fits in flight again.
        resumed, self._resumed = self._resumed, []
        if self._flights.next_end <= clock.seconds:
            return resumed

        busy = {fit.client for fit in self._flights.all}
        free = self.concurrency - len(busy)
        if not self.is_virtual:  # the time of an absent client is unknown
            busy |= {*self._absent}
        clients = self._launcher.draw(free, clock, self._draws, busy)
        self._draws += 1
        fits = [self._launcher.launch(client, clock) for client in clients]
        self._add(fits)
        return [*resumed, *(fit for fit in fits if fit.outcome == "arrived")]

    def arrivals(self, engine: Engine, clock: Clock, requests: MakeRequests) -> Iterator[Outcome]:
        """Yield outcomes until the buffer is full, and start clients in between.

        A failed client is replaced like one that came back, but does not count. If no clients
        remain, a partial buffer is aggregated.

        Raises:
            FederationError: If no update has arrived, and none can be expected.
        """
        self._buffer = set()  # filled by :meth:`accepted`
        engine.join(lambda: self._awaited(engine, clock))

        def submit(fits: list[Fit]) -> None:
            engine.submit(requests(fits))

        for fit in self._arriving(engine, clock, submit):
            yield self._flights.outcome(fit, engine)

    def _awaited(self, engine: Engine, clock: Clock) -> set[int]:
        """Return the fits that arrive for the next aggregation, including ones yet to start.

        They can train together, because none of them depends on another. A run that is resumed
        after the last aggregation groups them in the same way. If clients fail, other fits may
        arrive.
        """
        twin = copy.copy(self)
        twin._ended, twin._buffer = [], set()
        twin._launcher, twin._flights = self._launcher.copy(), self._flights.copy()
        numbers: set[int] = set()
        with suppress(FederationError):  # raised again when it happens
            for fit in twin._arriving(engine, replace(clock), lambda fits: None):
                numbers.add(fit.number)
                twin._buffer.add(fit.number)
        return numbers

    def _arriving(
        self, engine: Engine, clock: Clock, submit: Callable[[list[Fit]], None]
    ) -> Iterator[Fit]:
        """Yield the fits of the next aggregation when they arrive, and start others in between.

        The caller notes the accepted ones before it asks for the next.
        """
        timeout = math.inf if self.buffer_timeout is None else self.buffer_timeout
        closes, failed, lost = math.inf, 0, 0
        # Many failures in a row end the buffer, so a run in which no client can train ends.
        while len(self._buffer) < self.buffer_size and failed < self.concurrency:
            self._flights.measure(engine)
            next_end, next_start = self._flights.next_end, self._next_start(clock)
            moment = min(next_end, closes, next_start)
            if moment == math.inf or lost > _MOST_LOST * self.concurrency:
                if self._buffer:
                    return
                raise self._nobody_left(clock, lost)

            clock.seconds = moment
            # Arrivals come first, then the buffer timeout, then starts.
            if next_end == moment:
                fit = self._flights.pop()
                self._ended += [] if fit.outcome == "absent" else [fit]
                if fit.outcome in ("dropped", "absent"):
                    lost += 1
                else:
                    yield fit
                    lost, failed = 0, 0 if fit.number in self._buffer else failed + 1
                    if self._buffer == {fit.number}:  # its first update
                        closes = round(clock.seconds + timeout, 9)
            elif closes == moment:
                return

            # Once the buffer ends, new clients start from the next version.
            if len(self._buffer) < self.buffer_size and clock.seconds < closes:
                submit(self.start(clock))

    def accepted(self, update: ClientUpdate) -> None:
        self._buffer.add(update.number)

    def metrics(self) -> dict[str, float]:
        dropped = sum(fit.outcome == "dropped" for fit in self._ended)
        flying = sum(fit.outcome != "absent" for fit in self._flights.all)
        return {"in_flight": float(flying), "dropped": float(dropped)}

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._launcher.state_dict(),
            "in_flight": [dict(vars(fit)) for fit in self._flights.all],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._launcher.load_state_dict(state)
        self._flights = _Flights()
        self._add(Fit(**values) for values in state["in_flight"])
        self._resumed = [fit for fit in self._flights.all if fit.outcome == "arrived"]
        self._ended, self._round = [], -1

    def _add(self, fits: Iterable[Fit]) -> None:
        """Add fits to those in flight, and mark the fits of absent clients."""
        for fit in fits:
            if fit.client in self._absent:
                fit.outcome = "absent"
            self._flights.add(fit)

    def _next_start(self, clock: Clock) -> float:
        """Return when a client becomes available for a free place."""
        if len(self._flights.all) == self.concurrency:
            return math.inf
        appears = self._launcher.availability.next_start(clock.seconds)
        return math.inf if appears is None else appears

    def _nobody_left(self, clock: Clock, lost: int) -> FederationError:
        if not self._flights.all and lost <= _MOST_LOST:
            return self._launcher.nobody_comes(clock)
        return FederationError(
            f"round {clock.round + 1}: {lost} fits in a row were lost because their clients "
            f"dropped out, until virtual second {clock.seconds:g}; set schedule.speeds to shorter "
            "fits, or schedule.availability to longer stays"
        )


class _Flights:
    """The fits in flight, by the time at which they end."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, float, int, Fit]] = []
        self._unmeasured: list[Fit] = []
        self._outcomes: dict[int, Outcome] = {}

    def copy(self) -> "_Flights":
        """Return the same fits in flight, with an order of their own."""
        twin = copy.copy(self)
        twin._queue, twin._unmeasured = [*self._queue], [*self._unmeasured]
        return twin

    @property
    def all(self) -> list[Fit]:
        """Return the fits in order of their start."""
        fits = [fit for *_, fit in self._queue] + self._unmeasured
        return sorted(fits, key=lambda fit: fit.number)

    @property
    def next_end(self) -> float:
        """Return the virtual time of the next end, or infinity if none is known."""
        return self._queue[0][0] if self._queue else math.inf

    def add(self, fit: Fit) -> None:
        if fit.ended is None:
            self._unmeasured.append(fit)
        else:
            heapq.heappush(self._queue, (fit.ended, fit.started, fit.client, fit))

    def pop(self) -> Fit:
        """Remove and return the fit that ends next."""
        return heapq.heappop(self._queue)[-1]

    def measure(self, engine: Engine) -> None:
        """Train the fits whose duration must be measured, to know which one ends next."""
        for fit in self._unmeasured:
            outcome = engine.collect(fit.number)
            seconds = 0.0 if outcome.failed else outcome.update.seconds
            fit.ended = fit.started + seconds
            self._outcomes[fit.number] = outcome
        unmeasured, self._unmeasured = self._unmeasured, []
        for fit in unmeasured:
            self.add(fit)

    def outcome(self, fit: Fit, engine: Engine) -> Outcome:
        """Return the outcome of a fit that has ended."""
        if fit.number in self._outcomes:
            return self._outcomes.pop(fit.number)
        return engine.collect(fit.number)
