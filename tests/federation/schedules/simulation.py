"""Schedules without training: an engine whose fits have all succeeded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from flsuite.common.messages import Broadcast, ClientResult, ClientUpdate, FitRequest, Outcome
from flsuite.federation import Clock, Engine, Fit, Schedule, Speeds
from flsuite.federation.client.setup import WorkerSetup


class PerClient(Speeds):
    """Fixed seconds for each client."""

    def __init__(self, *seconds: float) -> None:
        self.per_client = seconds

    def seconds(self, fit: Fit) -> float:
        return self.per_client[fit.client]


class Succeeded(Engine):
    """An engine in which each fit succeeds, except for given clients."""

    def __init__(self, fails: Callable[[FitRequest], bool] = lambda request: False) -> None:
        self.requests: dict[int, FitRequest] = {}
        self.fails = fails
        self.collected: list[int] = []

    def start(self, setup: WorkerSetup) -> None: ...

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self.requests.update((request.number, request) for request in requests)

    @property
    def pending(self) -> Sequence[int]:
        return list(self.requests)

    def collect(self, number: int) -> Outcome:
        self.collected.append(number)
        request = self.requests.pop(number)
        client, round = request.client, request.broadcast.round
        if self.fails(request):
            return request.failure("it was told to")
        update = ClientUpdate(client, round, 1, 1, torch.ones(1), {}, number=request.number)
        return ClientResult(update, {})


@dataclass(frozen=True)
class Arrival:
    """One outcome as it reaches the server."""

    seconds: float
    client: int
    version: int
    staleness: int


@dataclass
class Simulation:
    """The loop of a federation without a model.

    Attributes:
        arrivals: Accepted updates, in order.
        rounds: The clients of each aggregation.
        times: Virtual seconds of each aggregation.
        starts: Every fit that was given to the engine.
    """

    schedule: Schedule
    engine: Succeeded = field(default_factory=Succeeded)
    clock: Clock = field(default_factory=Clock)
    arrivals: list[Arrival] = field(default_factory=list)
    rounds: list[list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    starts: list[Fit] = field(default_factory=list)

    def run(self, rounds: int) -> "Simulation":
        for _ in range(rounds):
            self.engine.submit(self.requests(self.schedule.start(self.clock)))
            clients = []
            for outcome in self.schedule.arrivals(self.engine, self.clock, self.requests):
                if isinstance(outcome, ClientResult):
                    version = outcome.update.round - 1
                    client, staleness = outcome.update.client, self.clock.round - version
                    arrival = Arrival(self.clock.seconds, client, version, staleness)
                    self.arrivals.append(arrival)
                    clients.append(client)
                    self.clock.client_updates += 1
                    self.schedule.accepted(outcome.update)
            self.clock.round += 1
            self.rounds.append(clients)
            self.times.append(self.clock.seconds)
        return self

    def requests(self, fits: Sequence[Fit]) -> list[FitRequest]:
        self.starts += fits
        return [
            FitRequest(fit.number, fit.client, Broadcast(fit.version + 1, {}, {}), {})
            for fit in fits
        ]


def simulate(
    schedule: Schedule, rounds: int, clients: int = 20, engine: Succeeded | None = None
) -> Simulation:
    """Configure a schedule and run it."""
    schedule.configure([10] * clients, seed=0)
    return Simulation(schedule, engine or Succeeded()).run(rounds)
