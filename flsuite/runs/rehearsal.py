"""A run without training, which steps the clock through all events."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import (
    Broadcast,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
)
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.base import Engine
from flsuite.federation.schedules.base import Fit
from flsuite.federation.schedules.faults import Faults
from flsuite.runs.run import Run
from flsuite.runs.table import TimelineRow, timeline_rows


def rehearse(run: Run) -> Iterator[TimelineRow]:
    """Yield the timeline of a run, assuming that no client fails and no callback stops it.

    Nothing is aggregated. If times depend on bytes, every round counts the bytes of the first round
    of the algorithm. SCAFFOLD, for example, sends more in later rounds.

    Args:
        run: A run that has not been opened. Nothing is written, and its model does not change.

    Raises:
        FlsuiteError: If times or clients of the schedule are known only while clients train.
        FederationError: If the schedule reaches a point after which no client is available.
    """
    federation, clock = run.federation, run.federation.clock
    schedule, engine = federation.schedule, _NoTraining()
    if not schedule.declarations.is_virtual:
        inner = "schedule." if isinstance(schedule, Faults) else ""
        raise FlsuiteError(
            f"the times of {type(schedule).__name__} are measured while clients train; set "
            f"trainer.schedule.{inner}speeds, for example to Stragglers"
        )
    if schedule.declarations.sees_updates:
        raise FlsuiteError(
            "the clients of a round depend on what others have sent before, so that there is no "
            "schedule without training; set trainer.schedule.sampling to uniform"
        )

    awaited: set[int] = set()

    def requests(fits: Sequence[Fit]) -> list[FitRequest]:
        awaited.update(fit.number for fit in fits)
        return [
            FitRequest(f.number, f.client, Broadcast(f.version + 1, {}, {}), {}, fault=f.fault)
            for f in fits
        ]

    while not run.finished:
        federation.requests([])  # begins the record of the round
        engine.submit(requests(schedule.start(clock)))
        for outcome in schedule.arrivals(engine, clock, requests):
            # Injected faults are part of the plan: failures, and messages that arrive twice or in
            # a later round.
            number = outcome.number if isinstance(outcome, ClientFailure) else outcome.update.number
            if number not in awaited:
                continue
            awaited.remove(number)
            if isinstance(outcome, ClientFailure):
                continue
            outcome.update.staleness = clock.round - (outcome.update.round - 1)
            federation.log.updates.append(outcome.update)
            clock.client_updates += 1
            schedule.accepted(number)
        clock.round += 1
        yield from timeline_rows(federation)


class _NoTraining(Engine):
    """An engine whose fits all end at once. They succeed unless a fault is injected."""

    def __init__(self) -> None:
        self._requests: dict[int, FitRequest] = {}

    def start(self, setup: WorkerSetup) -> None:
        """Do nothing."""

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._requests.update((request.number, request) for request in requests)

    @property
    def pending(self) -> Sequence[int]:
        return list(self._requests)

    def collect(self, number: int) -> Outcome:
        request = self._requests.pop(number)
        if request.fault not in (None, "late", "twice", "gone"):  # these happen in transit
            return request.failure(f"on purpose: {request.fault}")
        client, round = request.client, request.broadcast.round
        update = ClientUpdate(client, round, 1, 0, torch.zeros(0), {}, number=number)
        return ClientResult(update, {})
