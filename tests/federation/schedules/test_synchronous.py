"""Cohorts of synchronous rounds, and the virtual time that they take."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from flsuite import FlsuiteError
from flsuite.common.messages import ClientFailure, ClientResult, ClientUpdate, FitRequest, Outcome
from flsuite.federation import Clock, Fit, Synchronous
from tests.federation.schedules.simulation import Succeeded

ROUNDS = range(1, 2001)


def configured(
    *args: Any, sizes: list[int] | None = None, seed: int = 0, **kwargs: Any
) -> Synchronous:
    schedule = Synchronous(*args, **kwargs)
    schedule.configure(sizes or [10] * 20, seed)
    return schedule


def cohort(schedule: Synchronous, round: int) -> list[int]:
    """Return the clients that start in a round."""
    return [fit.client for fit in schedule.start(Clock(round=round - 1))]


@pytest.mark.parametrize(
    ("participation", "clients", "number"),
    [(1.0, 7, 7), (0.25, 20, 5), (0.1, 26, 3), (3, 7, 3), (0.999, 7, 7)],
)
def test_a_fraction_or_a_number(participation: float, clients: int, number: int) -> None:
    schedule = configured(participation, sizes=[1] * clients)
    for round in range(1, 20):
        clients_drawn = cohort(schedule, round)
        assert len(clients_drawn) == len(set(clients_drawn)) == number
        assert clients_drawn == sorted(clients_drawn)
        assert set(clients_drawn) <= set(range(clients))
        assert all(type(client) is int for client in clients_drawn)


@pytest.mark.parametrize("sampling", ["uniform", "poisson"])
def test_a_cohort_is_a_function_of_seed_and_round(sampling: Any) -> None:
    forward, backward = (configured(0.3, sampling=sampling) for _ in range(2))
    expected = {r: cohort(forward, r) for r in range(1, 50)}
    torch.rand(5), np.random.rand(5)
    assert {r: cohort(backward, r) for r in reversed(range(1, 50))} == expected
    assert [cohort(forward, 7) for _ in range(3)] == [expected[7]] * 3
    resumed = configured(0.3, sampling=sampling)
    resumed.load_state_dict(forward.state_dict())
    assert cohort(resumed, 49) == expected[49]
    assert cohort(configured(0.3, sampling=sampling, seed=1), 49) != expected[49]
    assert len({*map(tuple, expected.values())}) == 49


def test_uniform_sampling_ignores_sizes() -> None:
    schedule = configured(2, sizes=[1, 1, 1, 1000])
    counts = np.bincount(np.concatenate([cohort(schedule, r) for r in ROUNDS]), minlength=4)
    assert counts / len(ROUNDS) == pytest.approx([0.5] * 4, abs=0.05)


def test_sampling_by_size_is_without_replacement() -> None:
    """Check two of three: a client is left out if both others are drawn, in either order."""
    p = np.array([0.1, 0.2, 0.7])
    schedule = configured(2, sampling="size", sizes=[10, 20, 70])
    counts = np.bincount(np.concatenate([cohort(schedule, r) for r in ROUNDS]), minlength=3)
    left_out = [
        p[j] * p[k] / (1 - p[j]) + p[k] * p[j] / (1 - p[k]) for j, k in [(1, 2), (0, 2), (0, 1)]
    ]
    assert counts / len(ROUNDS) == pytest.approx(1 - np.array(left_out), abs=0.04)


class Finished(Succeeded):
    """An engine whose outcomes, by the numbers of their requests, are known in advance."""

    def __init__(self, outcomes: dict[int, Outcome]) -> None:
        super().__init__()
        self.outcomes = outcomes

    @property
    def pending(self) -> Sequence[int]:
        return list(self.outcomes)

    def collect(self, number: int) -> Outcome:
        self.collected.append(number)
        return self.outcomes.pop(number)


def no_requests(fits: Sequence[Fit]) -> list[FitRequest]:
    raise AssertionError("nobody starts in the middle of a round")


def result(client: int, seconds: float) -> ClientResult:
    return ClientResult(ClientUpdate(client, 1, 1, 1, torch.ones(1), {}, seconds=seconds), {})


def test_all_outcomes_arrive_as_submitted_and_the_clock_moves_by_the_slowest() -> None:
    outcomes: dict[int, Outcome] = {7: result(0, 0.5), 8: result(3, 2.0), 9: result(5, 1.0)}
    engine, clock = Finished(dict(outcomes)), Clock(round=4, seconds=10.0)

    assert list(configured().arrivals(engine, clock, no_requests)) == list(outcomes.values())
    assert engine.collected == [7, 8, 9] and not engine.pending
    assert clock == Clock(round=4, seconds=12.0)


def test_outcomes_are_collected_one_by_one() -> None:
    """Check that a mean holds at most one update at a time."""
    engine, clock = Finished({0: result(0, 0.5), 1: result(1, 2.0)}), Clock()
    arrivals = configured().arrivals(engine, clock, no_requests)

    next(arrivals)
    assert engine.collected == [0] and engine.pending == [1]


def test_a_failure_arrives_too_and_takes_no_time() -> None:
    failure = ClientFailure(2, 1, "it was unplugged")
    engine, clock = Finished({0: failure, 1: result(3, 0.25)}), Clock()

    first, second = configured().arrivals(engine, clock, no_requests)
    assert first is failure and isinstance(second, ClientResult)
    assert clock.seconds == 0.25

    assert list(configured().arrivals(Finished({0: failure}), clock, no_requests)) == [failure]
    assert clock.seconds == 0.25


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (0, "must be a share above 0 and at most 1.0, or a"),
        (-3, "must be a share above 0 and at most 1.0, or a"),
        (1.5, "at most 1.0"),
        (0.01, "0.01 of 20 clients comes to 0 clients"),
        (21, "21 of 20 clients comes to 21 clients"),
    ],
)
def test_an_infeasible_request_is_named(participation: float, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        configured(participation)
