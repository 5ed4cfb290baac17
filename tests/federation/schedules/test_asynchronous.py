"""The event queue of asynchronous federations: order, staleness, buffers, dropouts and resumes."""

from typing import Any

import numpy as np
import pytest

from flsuite import FlsuiteError
from flsuite.common.errors import FederationError
from flsuite.federation import Asynchronous, Availability, Bernoulli, Clock, Stragglers, Synchronous
from tests.federation.schedules.simulation import (
    Arrival,
    PerClient,
    Simulation,
    Succeeded,
    simulate,
)


def as_tuples(arrivals: list[Arrival]) -> list[tuple[float, int, int, int]]:
    return [(a.seconds, a.client, a.version, a.staleness) for a in arrivals]


def test_a_buffer_of_two_worked_out_by_hand() -> None:
    """The version changes with every second arrival. Other clients start at once."""
    schedule = Asynchronous(concurrency=3, buffer_size=2, speeds=PerClient(1, 2, 5))
    simulation = simulate(schedule, 4, clients=3)
    assert as_tuples(simulation.arrivals) == [
        (1, 0, 0, 0),
        (2, 1, 0, 0),  # started at 0, before client 0, which started again at 1
        (2, 0, 0, 1),
        (3, 0, 1, 0),
        (4, 1, 1, 1),
        (4, 0, 2, 0),
        (5, 2, 0, 3),
        (5, 0, 3, 0),
    ]
    assert simulation.rounds == [[0, 1], [0, 0], [1, 0], [2, 0]]
    assert simulation.times == [2, 3, 4, 5]


def test_a_fit_that_starts_again_from_one_version_has_its_own_randomness() -> None:
    schedule = Asynchronous(concurrency=2, buffer_size=2, speeds=PerClient(1, 10))
    simulation = simulate(schedule, 3, clients=2)
    repeats = [(fit.client, fit.version, fit.repeat) for fit in simulation.starts]
    assert repeats[:4] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert len(set(repeats)) == len(repeats)
    assert [fit.number for fit in simulation.starts] == list(range(len(repeats)))


@pytest.mark.parametrize("cohort", [3, 8])
def test_with_equal_speeds_it_is_synchronous(cohort: int) -> None:
    """Concurrency, buffer and cohort are equal: the same cohorts, versions and times."""
    speeds = PerClient(*[2.0] * 8)
    waits = simulate(Synchronous(cohort, speeds=speeds), 12, clients=8)
    flows = simulate(Asynchronous(cohort, cohort, speeds=speeds), 12, clients=8)
    assert flows.rounds == waits.rounds
    assert [(a.client, a.version, a.staleness) for a in flows.arrivals] == [
        (a.client, a.version, a.staleness) for a in waits.arrivals
    ]
    assert flows.times == waits.times == [2.0 * r for r in range(1, 13)]
    assert [f.repeat for f in flows.starts] == [0] * len(flows.starts)


def test_a_timeout_aggregates_what_has_arrived() -> None:
    schedule = Asynchronous(2, buffer_size=2, buffer_timeout=3, speeds=PerClient(1, 9, 9, 9))
    simulation = simulate(schedule, 1, clients=2)
    # Client 0 comes back at 1, and again at 2: the buffer is full before its time is over.
    assert simulation.rounds == [[0, 0]] and simulation.times == [2]

    slow = Asynchronous(1, buffer_size=5, buffer_timeout=2.5, speeds=PerClient(1.0))
    simulation = simulate(slow, 2, clients=1)
    # From the first arrival at 1 until 3.5: arrivals at 1, 2 and 3, then 4, 5 and 6 until 6.5.
    assert simulation.rounds == [[0, 0, 0], [0, 0, 0]]
    assert simulation.times == [3.5, 6.5]


def test_who_comes_back_as_a_buffer_closes_starts_from_the_next_version() -> None:
    """Client 0 comes back at 1, which opens the buffer, and at 2, which closes it."""
    schedule = Asynchronous(2, buffer_size=2, buffer_timeout=1.0, speeds=PerClient(1, 9))
    simulation = simulate(schedule, 1, clients=2)
    assert simulation.rounds == [[0, 0]]

    wide = Asynchronous(2, buffer_size=5, buffer_timeout=1.0, speeds=PerClient(1, 9))
    simulation = simulate(wide, 3, clients=2)
    assert simulation.times == [2, 4, 6]
    starts = [(fit.client, fit.started, fit.version) for fit in simulation.starts]
    assert starts[:6] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 2, 1), (0, 3, 1), (0, 4, 2)]


def test_ties_are_kept_in_spite_of_rounding() -> None:
    """Eight fits of 0.1 s end together with one of 0.8 s, which started first."""
    schedule = Asynchronous(2, speeds=PerClient(0.1, 0.8))
    simulation = simulate(schedule, 9, clients=2)
    assert as_tuples(simulation.arrivals)[7:] == [(0.8, 1, 0, 7), (0.8, 0, 7, 1)]


@pytest.mark.parametrize("schedule", [Asynchronous(2), Asynchronous(2, 2, buffer_timeout=1.0)])
def test_when_every_fit_is_lost_the_run_ends(schedule: Asynchronous) -> None:
    class Brief(Availability):
        def leaves(self, client: int, number: int, started: float, seconds: float) -> float:
            return started + 0.5

    schedule.speeds, schedule.availability = PerClient(1, 1), Brief()
    with pytest.raises(FederationError, match="fits in a row were lost because their clients"):
        simulate(schedule, 1, clients=2)


def test_a_buffer_that_nobody_is_left_to_fill_is_aggregated() -> None:
    schedule = Asynchronous(2, 2, speeds=PerClient(1, 1.5), availability=Shift())
    simulation = simulate(schedule, 3, clients=2)
    # Until 3: 1, 1.5 and 2, 3. From 10 on: 11, 11.5. The arrival at 12 would be too late.
    assert simulation.rounds == [[0, 1], [0, 0], [1, 0]] or simulation.times[-1] <= 12
    with pytest.raises(FederationError, match="the last aggregation was number"):
        simulation.run(5)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_impossible_seconds_are_named(seconds: float) -> None:
    with pytest.raises(FlsuiteError, match=r"PerClient: a fit of client 0 takes .* finite"):
        simulate(Asynchronous(1, speeds=PerClient(seconds)), 1, clients=1)


def test_an_arrival_at_the_timeout_still_counts() -> None:
    schedule = Asynchronous(1, buffer_size=5, buffer_timeout=2.0, speeds=PerClient(1.0))
    assert simulate(schedule, 1, clients=1).rounds == [[0, 0, 0]]


def test_concurrency_is_kept_and_nobody_trains_twice_at_a_time() -> None:
    schedule = Asynchronous(6, buffer_size=2, speeds=Stragglers(), availability=Bernoulli(0.3))
    simulation = simulate(schedule, 1)
    for _ in range(60):
        in_flight = [fit.client for fit in schedule.in_flight]
        assert len(in_flight) == len(set(in_flight)) <= 6
        simulation.run(1)
    assert len(schedule.in_flight) >= 4  # the aggregated clients start next
    assert schedule.metrics()["in_flight"] == len(schedule.in_flight)


def test_who_starts_is_drawn_uniformly() -> None:
    schedule = Asynchronous(5, buffer_size=1, speeds=PerClient(*[1.0] * 20))
    simulation = simulate(schedule, 3000)
    counts = np.bincount([fit.client for fit in simulation.starts], minlength=20)
    assert counts.sum() >= 3000
    assert np.abs(counts / counts.sum() - 1 / 20).max() < 0.012


def test_a_dropout_is_replaced_at_once_and_never_trained() -> None:
    class SecondLeaves(Availability):
        def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
            return started + seconds / 2 if client == 1 else None

    schedule = Asynchronous(2, buffer_size=1, speeds=PerClient(4, 4), availability=SecondLeaves())
    simulation = simulate(schedule, 4, clients=2)
    assert [a.client for a in simulation.arrivals] == [0, 0, 0, 0]
    assert {fit.client for fit in simulation.starts} == {0}
    dropped = [fit for fit in schedule.ended if fit.outcome == "dropped"]
    assert [(fit.client, fit.started, fit.ended) for fit in dropped] == [(1, 10, 12), (1, 12, 14)]


def test_failures_are_replaced_and_do_not_fill_the_buffer() -> None:
    engine = Succeeded(fails=lambda request: request.client == 0)
    schedule = Asynchronous(3, buffer_size=2, speeds=PerClient(1, 2, 2))
    simulation = simulate(schedule, 5, clients=3, engine=engine)
    assert simulation.rounds == [[1, 2]] * 5


def test_when_everybody_fails_the_round_ends_without_updates() -> None:
    engine = Succeeded(fails=lambda request: True)
    simulation = simulate(Asynchronous(3, speeds=PerClient(1, 2, 5)), 1, clients=3, engine=engine)
    assert simulation.rounds == [[]]
    assert len(engine.collected) == 3


class Shift(Availability):
    """All clients are available in [0, 3) and in [10, 12), and never again."""

    def available(self, seconds: float) -> np.ndarray:
        return np.full(2, 0 <= seconds < 3 or 10 <= seconds < 12)

    def next_start(self, seconds: float) -> float | None:
        return 10.0 if seconds < 10 else None

    def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
        end = 3 if started < 3 else 12
        return float(end) if started + seconds > end else None


@pytest.mark.parametrize("schedule", [Asynchronous, Synchronous])
def test_when_all_clients_are_away_time_passes_until_one_is_back(schedule: Any) -> None:
    size = {"concurrency": 2, "buffer_size": 2} if schedule is Asynchronous else {}
    configured = schedule(**size, speeds=PerClient(1, 1), availability=Shift())
    simulation = simulate(configured, 5, clients=2)
    assert simulation.times == [1, 2, 3, 11, 12]
    with pytest.raises(FederationError, match=r"from virtual second 12 on; .*a longer trace"):
        simulation.run(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 21}, "concurrency 21 is above the number of clients"),
        ({"concurrency": 4, "buffer_size": 5}, "buffer_size 5 is above concurrency 4"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"buffer_size": 0}, "buffer_size must be at least 1"),
        ({"buffer_timeout": 0}, "buffer_timeout must be positive"),
    ],
)
def test_bad_requests(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        Asynchronous(**settings).configure([1] * 20, 0)


@pytest.mark.parametrize("stop", [1, 2, 7, 20])
def test_a_resumed_schedule_goes_on_as_it_would_have(stop: int) -> None:
    def schedule() -> Asynchronous:
        drawn: dict[str, Any] = {"speeds": Stragglers(per_fit=True), "availability": Bernoulli(0.2)}
        return Asynchronous(6, buffer_size=3, buffer_timeout=0.4, **drawn)

    whole = simulate(schedule(), 40)
    first = simulate(schedule(), stop)
    second = schedule()
    second.configure([10] * 20, 0)
    second.load_state_dict(first.schedule.state_dict())
    resumed = Simulation(second, clock=Clock(**vars(first.clock))).run(40 - stop)

    assert first.arrivals + resumed.arrivals == whole.arrivals
    assert first.times + resumed.times == whole.times
    # Fits in flight are given to the new engine, from the old versions.
    in_flight = [f.number for f in first.schedule.in_flight if f.outcome == "arrived"]
    assert [f.number for f in resumed.starts[: len(in_flight)]] == in_flight


def test_a_client_is_asked_again_only_after_its_last_update() -> None:
    """Its memory has changed with that update."""
    engine = Succeeded()
    schedule = Asynchronous(4, buffer_size=4, speeds=Stragglers())
    schedule.configure([10] * 4, 0)
    simulation = Simulation(schedule, engine)
    for _ in range(10):
        simulation.run(1)
        clients = [request.client for request in engine.requests.values()]
        assert len(clients) == len(set(clients))
