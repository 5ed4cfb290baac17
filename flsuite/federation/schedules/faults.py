"""Fault injection: clients that fail in every way that a federation must survive."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from flsuite.common.arguments import BelowOne, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import (
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Fault,
    FitRequest,
    Outcome,
)
from flsuite.common.random import numpy_generator
from flsuite.federation.engines.base import Engine
from flsuite.federation.schedules.base import Amounts, Clock, Fit, MakeRequests, Schedule

_FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass
class Faults(Schedule, Settings):
    """Injects faults into some fits of another schedule.

    Take it to test a method against clients that fail.

    Which fits fail, and how, are functions of the run's seed, the number of the fit and the client,
    drawn from a separate stream. The other fits are unchanged. The run therefore ends with the same
    weights as a run without the failed fits.

    Args:
        schedule: Who trains when.
        raises: Probability that a client's code raises an error after its training.
        nan: Probability that a client's model contains a NaN.
        shapes: Probability that a client's model contains a tensor of a wrong shape.
        hangs: Probability that a fit never ends. It requires ``Processes`` or ``Ray`` with a
            timeout.
        dies: Probability that a fit kills its worker, also on a retry. It requires worker
            processes.
        late: Probability that an update arrives after its round was closed.
        twice: Probability that an update arrives a second time. Only the first one counts.
        gone: Probability that a client is lost after its masked update has arrived. The update
            counts, and the others unmask the sum without the client. It requires secure
            aggregation.
    """

    schedule: Schedule
    raises: BelowOne = 0.0
    nan: BelowOne = 0.0
    shapes: BelowOne = 0.0
    hangs: BelowOne = 0.0
    dies: BelowOne = 0.0
    late: BelowOne = 0.0
    twice: BelowOne = 0.0
    gone: BelowOne = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.schedule, Faults):
            raise FlsuiteError(
                "Faults: schedule is a Faults too, and a fit fails in one way only; set all "
                "probabilities in one of them"
            )
        self._declare()
        self._bounds = np.cumsum([getattr(self, name) for name in _FAULTS])
        if (total := round(float(self._bounds[-1]), 9)) >= 1:  # ten times 0.1 is 1
            raise FlsuiteError(
                f"Faults: the sum of the probabilities must be in [0, 1), got {total}"
            )

    def configure(
        self,
        sizes: Sequence[int],
        seed: int,
        work: Amounts | None = None,
        absent: Collection[int] = (),
    ) -> None:
        self.schedule.configure(sizes, seed, work, absent)
        self._declare()
        self._seed = seed
        self._mishandled: dict[int, Fit] = {}  # fits in flight whose messages come late or twice
        self._late: list[ClientUpdate] = []  # late updates of earlier rounds

    @property
    def ended(self) -> Sequence[Fit]:
        return self.schedule.ended

    @property
    def in_flight(self) -> Sequence[Fit]:
        return self.schedule.in_flight

    def start(self, clock: Clock) -> list[Fit]:
        return self._with_faults(self.schedule.start(clock))

    def arrivals(self, engine: Engine, clock: Clock, requests: MakeRequests) -> Iterator[Outcome]:
        """Yield the outcomes of the schedule, and messages that come late or twice.

        A late message is held back until the next round, and a failure takes its place.
        """

        def with_faults(fits: Sequence[Fit]) -> list[FitRequest]:
            return requests(self._with_faults(fits))

        held, self._late = self._late, []
        for update in held:
            yield ClientResult(update, {})
        for outcome in self.schedule.arrivals(engine, clock, with_faults):
            yield from self._delivered(outcome)

    def accepted(self, update: ClientUpdate) -> None:
        self.schedule.accepted(update)

    def metrics(self) -> dict[str, float]:
        return self.schedule.metrics()

    def state_dict(self) -> dict[str, Any]:
        held = [{f.name: getattr(update, f.name) for f in fields(update)} for update in self._late]
        return {"schedule": self.schedule.state_dict(), "held": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self._late = [ClientUpdate(**values) for values in state["held"]]
        self._mishandled = {}
        self._note(self.schedule.in_flight)

    def _declare(self) -> None:
        """Declare what the schedule declares, and the faults."""
        for name in Schedule.__annotations__:
            setattr(self, name, getattr(self.schedule, name))
        self.may_lose = True
        self.faults = tuple(fault for fault in _FAULTS if getattr(self, fault))

    def _with_faults(self, fits: Sequence[Fit]) -> list[Fit]:
        """Assign faults to the fits that start now."""
        for fit in fits:
            fit.fault = self._drawn(fit)
        self._note(fits)
        return list(fits)

    def _drawn(self, fit: Fit) -> Fault | None:
        draw = numpy_generator(self._seed, "faults", fit.number, fit.client).random()
        place = int(np.searchsorted(self._bounds, draw, side="right"))
        return _FAULTS[place] if place < len(_FAULTS) else None

    def _note(self, fits: Sequence[Fit]) -> None:
        self._mishandled |= {fit.number: fit for fit in fits if fit.fault in ("late", "twice")}

    def _delivered(self, outcome: Outcome) -> Iterator[Outcome]:
        """Yield the messages about an outcome that the server receives while its round is open."""
        number = outcome.number if outcome.failed else outcome.update.number
        fit = self._mishandled.pop(number, None)
        if fit is None or outcome.failed:
            yield outcome
        elif fit.fault == "twice":
            second = replace(outcome, update=replace(outcome.update))
            yield outcome
            yield second
        else:
            # The server refuses a late message by its number, so its tensors are not kept.
            self._late.append(outcome.update.without_tensors())
            fit.outcome = "late"
            update, reason = outcome.update, "its update did not arrive in time"
            yield ClientFailure(
                update.client, update.round, reason, number=number, steps=update.steps
            )
