"""Cohorts of rounds in lockstep."""

from typing import Any

import numpy as np
import pytest
import torch

from flsuite import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.schedules import Synchronous

ROUNDS = range(1, 2001)


def configured(
    *args: Any, sizes: list[int] | None = None, seed: int = 0, **kwargs: Any
) -> Synchronous:
    schedule = Synchronous(*args, **kwargs)
    schedule.configure(sizes or [10] * 20, seed)
    return schedule


@pytest.mark.parametrize(
    ("participation", "clients", "number"),
    [
        (1.0, 7, 7),
        (0.25, 20, 5),
        (0.1, 26, 3),
        (0.06, 10, 1),
        (1, 7, 1),
        (3, 7, 3),
        (7, 7, 7),
        (0.999, 7, 7),
    ],
)
def test_a_fraction_or_a_number(participation: float, clients: int, number: int) -> None:
    schedule = configured(participation, sizes=[1] * clients)
    for round in range(1, 20):
        cohort = schedule.cohort(round)
        assert len(cohort) == len(set(cohort)) == number
        assert cohort == sorted(cohort)
        assert set(cohort) <= set(range(clients))
        assert all(type(client) is int for client in cohort)


def test_everybody_by_default() -> None:
    assert configured().cohort(1) == list(range(20))


def test_a_cohort_is_a_function_of_seed_and_round() -> None:
    forward, backward = configured(0.3), configured(0.3)
    expected = {r: forward.cohort(r) for r in range(1, 50)}
    torch.rand(5), np.random.rand(5)
    assert {r: backward.cohort(r) for r in reversed(range(1, 50))} == expected
    assert [forward.cohort(7) for _ in range(3)] == [expected[7]] * 3
    resumed = configured(0.3)
    resumed.load_state_dict(forward.state_dict())
    assert resumed.cohort(49) == expected[49]


def test_rounds_and_seeds_draw_anew() -> None:
    schedule = configured(0.5)
    assert len({tuple(schedule.cohort(r)) for r in range(1, 21)}) == 20
    assert [schedule.cohort(r) for r in range(1, 21)] != [
        configured(0.5, seed=1).cohort(r) for r in range(1, 21)
    ]


def test_uniform_sampling_ignores_sizes() -> None:
    schedule = configured(2, sizes=[1, 1, 1, 1000])
    counts = np.bincount(np.concatenate([schedule.cohort(r) for r in ROUNDS]), minlength=4)
    assert counts / len(ROUNDS) == pytest.approx([0.5] * 4, abs=0.05)


def test_sampling_by_size_is_in_proportion() -> None:
    schedule = configured(1, sampling="size", sizes=[10, 20, 30, 40])
    counts = np.bincount(np.concatenate([schedule.cohort(r) for r in ROUNDS]), minlength=4)
    assert counts / len(ROUNDS) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.04)


def test_sampling_by_size_is_without_replacement() -> None:
    """Two of three: client i is left out if the others are drawn, in either order."""
    p = np.array([0.1, 0.2, 0.7])
    schedule = configured(2, sampling="size", sizes=[10, 20, 70])
    counts = np.bincount(np.concatenate([schedule.cohort(r) for r in ROUNDS]), minlength=3)
    left_out = [
        p[j] * p[k] / (1 - p[j]) + p[k] * p[j] / (1 - p[k]) for j, k in [(1, 2), (0, 2), (0, 1)]
    ]
    assert counts / len(ROUNDS) == pytest.approx(1 - np.array(left_out), abs=0.04)


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    updates = [
        ClientUpdate(i, 1, 1, 1, torch.ones(1), {}, seconds=s)
        for i, s in enumerate([0.5, 2.0, 1.0])
    ]
    assert configured().elapse(updates) == 2.0
    assert configured().elapse([]) == 0.0


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (0, "must be positive"),
        (-0.5, "must be positive"),
        (-3, "must be positive"),
        (1.5, "at most 1.0"),
        (0.01, "gives no client"),
        (21, "more than the 20 clients"),
    ],
)
def test_an_infeasible_request_is_named(participation: float, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        configured(participation)
