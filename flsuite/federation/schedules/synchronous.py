"""Synchronous schedule: draw a cohort, train all of it, and wait for the last client."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from flsuite.common.arguments import PositiveFloat, Settings, at_least
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientUpdate, Outcome
from flsuite.common.random import numpy_generator
from flsuite.federation.engines.base import Engine
from flsuite.federation.schedules.base import (
    Amounts,
    Availability,
    Clock,
    Fit,
    MakeRequests,
    Measured,
    Schedule,
    Speeds,
)
from flsuite.federation.schedules.launcher import Launcher
from flsuite.federation.schedules.selection import Selection, ShareOrNumber, at_random
from flsuite.metrics.privacy import RandomDraw

_MOST_EMPTY_COHORTS = 1000  # in a row, before giving up


@dataclass
class Synchronous(Schedule, Settings):
    """McMahan et al. 2017, algorithm 1: a random cohort per round, drawn without replacement.

    Take it unless time matters: it is the default.

    A round takes as long as its slowest client. Over-selection and the deadline follow Bonawitz et
    al. 2019, Towards Federated Learning at Scale, arXiv:1902.01046, section 2: the round starts
    more clients than it needs, accepts the first ones, and ignores the others.

    Args:
        participation: Fraction of the clients in (0, 1] as a float, or their number as an integer.
            A fraction is rounded to the nearest number of clients.
        sampling: ``uniform``, ``size`` (probabilities in proportion to training samples),
            ``poisson`` (each client independently), or a class that chooses by what clients have
            sent before: ``PowerOfChoice`` or ``Oort``. Under ``size``, aggregators must weight
            clients uniformly: weights by samples would count size twice. Under ``poisson``, the
            cohort size varies from round to round, and ``participation`` is its mean as a fraction
            or a number. A cohort may be empty. Such a round counts, and its change is 0.
        over_selection: Number of clients to start, as a multiple of the number that the round waits
            for. The paper uses 1.3.
        deadline: Virtual seconds after which a round ends with the updates so far. Default: wait
            for all.
        speeds: How long fits take on the virtual clock. Default: as long as on this machine.
        availability: Which clients can train, and which drop out. Default: all clients, always.
    """

    participation: ShareOrNumber = 1.0
    sampling: Literal["uniform", "size", "poisson"] | Selection = "uniform"
    over_selection: Annotated[float, at_least(1)] = 1.0
    deadline: PositiveFloat | None = None
    speeds: Speeds | None = None
    availability: Availability | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_limited = self.over_selection > 1 or self.deadline is not None
        self.is_virtual = self.speeds is not None and not self.speeds.is_measured
        self.may_lose = is_limited or self.availability is not None
        self.may_be_empty = self.sampling == "poisson"
        self.sees_updates = isinstance(self.sampling, Selection)
        if self.may_be_empty and self.may_lose:
            raise FlsuiteError(
                "Synchronous: sampling poisson draws clients independently of speed and "
                "availability; leave out over_selection, deadline and availability, or set "
                "sampling to uniform"
            )
        if is_limited and not self.is_virtual:
            raise FlsuiteError(
                "Synchronous: over_selection and deadline need times that do not depend on the "
                "machine; set schedule.speeds, for example to Stragglers"
            )

    def configure(
        self,
        sizes: Sequence[int],
        seed: int,
        work: Amounts | None = None,
        absent: Collection[int] = (),
    ) -> None:
        clients = len(sizes)
        # Rounded half up. round() would round 0.5 and 2.5 to an even number.
        share_as_number = int(self.participation * clients + 0.5)
        is_share = isinstance(self.participation, float)
        self._number = share_as_number if is_share else int(self.participation)
        self._clients, self._seed, self._absent = clients, seed, absent
        # Under Poisson sampling, the expected cohort size need not be an integer.
        is_mean = is_share and self.may_be_empty
        self._expected = float(self.participation * clients if is_mean else self._number)

        fewest = 0 if self.may_be_empty else 1
        if not fewest <= self._number <= clients:
            remedy = "raise it" if self._number < 1 else "lower it"
            raise FlsuiteError(
                f"Synchronous: participation {self.participation} of {clients} clients comes to "
                f"{self._number} clients; {remedy}"
            )
        started = int(self._number * self.over_selection + 0.5)
        if started > clients:
            raise FlsuiteError(
                f"Synchronous: over_selection {self.over_selection} starts {started} clients, and "
                f"there are {clients}; lower it, or lower participation"
            )

        is_random = self.sampling != "size" and not (self.may_lose or self.sees_updates)
        draw = RandomDraw(clients, self._expected, self.may_be_empty)
        self.client_sampling = draw if is_random else None
        self.cohort, self.expected_updates = started, self._number
        self.draws_by_size = self.sampling == "size" and started < clients

        speeds = self.speeds or Measured()
        weights = np.asarray(sizes, dtype=np.float64) if self.sampling == "size" else None
        chosen = self.sampling
        self._selection = chosen if isinstance(chosen, Selection) else at_random(weights)
        self._selection.configure(sizes, started)
        self._launcher = Launcher(speeds, self.availability, sizes, seed, work)
        self._cohort: list[Fit] = []
        self._was_absent = False  # the whole cohort
        self._ends: float | None = None
        self._ended: list[Fit] = []
        self._round, self._lost = -1, 0

    @property
    def ended(self) -> Sequence[Fit]:
        return self._ended

    @property
    def in_flight(self) -> Sequence[Fit]:
        return self._cohort

    def start(self, clock: Clock) -> list[Fit]:
        """Draw the next cohort, and return the fits whose updates the round will use.

        The cohort is a function of the seed and the round, unless a whole cohort of this round has
        been lost.
        """
        if clock.round != self._round:
            self._round, self._ended, self._lost = clock.round, [], 0
        number = self._draw_size(clock) if self.may_be_empty else self.cohort
        clients = self._selection.choose(number, clock, self._launcher, self._lost)
        self._selection.started(clients, clock.round)
        launched = [self._launcher.launch(client, clock) for client in clients]
        self._cohort = [fit for fit in launched if fit.client not in self._absent]
        self._was_absent = bool(launched) and not self._cohort
        return self._arriving(clock.seconds)

    def arrivals(self, engine: Engine, clock: Clock, requests: MakeRequests) -> Iterator[Outcome]:
        """Yield the outcomes in the order of the clients, whoever finishes first.

        A cohort without any update, because all clients dropped out or were late, is replaced by
        another one.
        """
        while not engine.pending and not self.may_be_empty:
            self._end_lost_cohort(clock)
            self._lost += 1
            if self._lost > _MOST_EMPTY_COHORTS:
                raise FederationError(
                    f"round {clock.round + 1}: no client of {self._lost} cohorts came back; raise "
                    "schedule.deadline, or lower the dropout of schedule.availability"
                )
            engine.submit(requests(self.start(clock)))

        measured = 0.0
        fits = {fit.number: fit for fit in self._cohort}
        # Not in the order in which fits finish: results must not depend on the engine.
        for number in engine.pending:
            outcome = engine.collect(number)
            if not outcome.failed:
                measured = max(measured, outcome.update.seconds)
                if number in fits and fits[number].ended is None:  # its duration was unknown
                    fits[number].ended = fits[number].started + outcome.update.seconds
            yield outcome
        self._end_round(clock, measured)

    def accepted(self, update: ClientUpdate) -> None:
        if not self._selection.reads_updates:
            return
        (fit,) = (fit for fit in self._cohort if fit.number == update.number)
        # Measured times differ from run to run, and must not choose clients.
        seconds = _end(fit) - fit.started if self.is_virtual else 0.0
        self._selection.arrived(update, seconds)

    def metrics(self) -> dict[str, float]:
        if not self.may_lose:
            return {}
        outcomes = [fit.outcome for fit in self._ended]
        return {name: float(outcomes.count(name)) for name in ("dropped", "late")}

    def state_dict(self) -> dict[str, Any]:
        chosen = self._selection.state_dict()
        return {**self._launcher.state_dict(), **({"selection": chosen} if chosen else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._launcher.load_state_dict(state)
        self._selection.load_state_dict(state.get("selection", {}))
        self._cohort, self._ends, self._ended, self._round = [], None, [], -1

    def _draw_size(self, clock: Clock) -> int:
        """Draw the size of a Poisson cohort.

        The size of a Poisson cohort is binomial. Given the size, the cohort is drawn without
        replacement, so the cost depends on the cohort and not on the number of clients.
        """
        rng = numpy_generator(self._seed, "cohort/size", clock.round + 1)
        return int(rng.binomial(self._clients, self._expected / self._clients))

    def _arriving(self, now: float) -> list[Fit]:
        """Decide which updates the round uses, and when it ends."""
        arriving = [fit for fit in self._cohort if fit.outcome == "arrived"]
        self._ends = None
        if not self.is_virtual:
            return arriving

        # The first ones by the clock. Ties go to the lower client number.
        wanted = len(self._cohort) if self.may_be_empty else self._number
        deadline = math.inf if self.deadline is None else now + self.deadline
        in_time = [fit for fit in arriving if _end(fit) <= deadline]
        first = sorted(in_time, key=lambda fit: (_end(fit), fit.client))[:wanted]

        # With enough updates, the round is over. Otherwise it waits for all clients.
        last = max((_end(fit) for fit in self._cohort), default=now)
        is_enough = len(first) == wanted > 0
        self._ends = _end(first[-1]) if is_enough else min(last, deadline)
        accepted = {fit.number for fit in first}
        for fit in arriving:
            fit.outcome = "arrived" if fit.number in accepted else "late"
        return [fit for fit in arriving if fit.number in accepted]

    def _end_round(self, clock: Clock, measured: float) -> None:
        # All clients train in parallel, each on its own machine.
        clock.seconds = clock.seconds + measured if self._ends is None else self._ends
        for fit in self._cohort:
            if fit.ended is None:  # the duration of a failed fit is unknown
                fit.ended = clock.seconds
            # Fits that have not ended by now are ignored.
            if fit.outcome == "late" or fit.ended > clock.seconds:
                fit.ended, fit.outcome = clock.seconds, "late"
                self._selection.left_out(fit.client)
        self._ended += sorted(self._cohort, key=lambda fit: (_end(fit), fit.client))
        self._cohort = []

    def _end_lost_cohort(self, clock: Clock) -> None:
        """End a cohort without updates, or wait until a client is available."""
        if self._cohort or self._was_absent:
            self._end_round(clock, measured=0.0)
            return
        appears = self._launcher.availability.next_start(clock.seconds)
        if appears is None:
            raise self._launcher.nobody_comes(clock)
        clock.seconds = appears


def _end(fit: Fit) -> float:
    return math.inf if fit.ended is None else fit.ended
