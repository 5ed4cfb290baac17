"""Poisson cohorts: independent draws, empty rounds, and incompatible settings."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flsuite import FlsuiteError
from flsuite.aggregators import SCAFFOLD, Centralized, FedAvg, PairwiseMasks
from flsuite.callbacks import FederationCallback
from flsuite.federation import Bernoulli, Clock, Stragglers, Synchronous
from flsuite.metrics.privacy import RandomDraw
from tests.conftest import classifier, digits, equal_states, trainer

ROUNDS = range(2500)


def configured(participation: int | float, clients: int = 20, **kwargs: Any) -> Synchronous:
    schedule = Synchronous(participation, sampling="poisson", **kwargs)
    schedule.configure([10] * clients, seed=0)
    return schedule


def cohorts(schedule: Synchronous, rounds: range = ROUNDS) -> list[list[int]]:
    return [[fit.client for fit in schedule.start(Clock(round=round))] for round in rounds]


def test_clients_are_drawn_independently() -> None:
    drawn = np.zeros((len(ROUNDS), 20))
    for row, cohort in zip(drawn, cohorts(configured(0.3)), strict=True):
        assert cohort == sorted(set(cohort))
        row[cohort] = 1
    sizes = drawn.sum(1)
    assert sizes.mean() == pytest.approx(6, abs=0.15)
    assert sizes.var() == pytest.approx(20 * 0.3 * 0.7, rel=0.1)
    assert drawn.mean(0) == pytest.approx(np.full(20, 0.3), abs=0.035)
    correlations = np.corrcoef(drawn.T)[~np.eye(20, dtype=bool)]
    assert np.abs(correlations).max() < 0.08


@pytest.mark.parametrize(("participation", "clients", "expected"), [(0.25, 10, 2.5), (3, 10, 3)])
def test_participation_is_a_mean(participation: float, clients: int, expected: float) -> None:
    schedule = configured(participation, clients)
    assert schedule.client_sampling == RandomDraw(clients, expected, True)
    assert np.mean([len(c) for c in cohorts(schedule)]) == pytest.approx(expected, abs=0.12)


def test_virtual_time_takes_all_of_a_cohort() -> None:
    schedule = configured(0.2, speeds=Stragglers())
    assert {len(cohort) for cohort in cohorts(schedule, range(200))} >= {0, 2, 4, 7}


@pytest.mark.parametrize("aggregator", [FedAvg, SCAFFOLD])
def test_a_round_without_a_client_leaves_the_model(aggregator: type) -> None:
    """Half of the rounds have no client; they count, and the model stays."""
    schedule = Synchronous(0.1, sampling="poisson")
    states = []

    class Keep(FederationCallback):
        affects = "nothing"

        def on_round_end(self, run: Any, round: int) -> None:
            states.append((len(run.federation.log.updates), dict(run.federation.state)))

    made = trainer(rounds=8, aggregator=aggregator(), schedule=schedule, callbacks=[Keep()])
    made.fit(classifier(), digits())
    sizes = [size for size, _ in states]
    assert made.round == 8 and 0 in sizes[1:] and any(sizes)
    for (_, before), (size, after) in pairwise(states):
        assert equal_states(before, after) == (size == 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"over_selection": 1.3, "speeds": Stragglers()},
        {"deadline": 1.0, "speeds": Stragglers()},
        {"availability": Bernoulli(0.1)},
    ],
)
def test_a_choice_by_speed_or_availability_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(FlsuiteError, match="sampling poisson draws clients independently"):
        Synchronous(0.5, sampling="poisson", **arguments)


def test_what_needs_a_known_cohort_is_refused() -> None:
    schedule = Synchronous(0.5, sampling="poisson")
    with pytest.raises(FlsuiteError, match="PairwiseMasks needs a cohort of known size"):
        trainer(rounds=1, schedule=schedule, secure_sum=PairwiseMasks()).fit(classifier(), digits())
    with pytest.raises(FlsuiteError, match="Synchronous needs clients, but Centralized"):
        trainer(rounds=1, schedule=schedule, aggregator=Centralized()).fit(classifier(), digits())
    with pytest.raises(FlsuiteError, match="comes to 21 clients; lower it"):
        configured(21)


def test_other_cohorts_say_how_they_are_drawn() -> None:
    def sampling(**kwargs: Any) -> RandomDraw | None:
        schedule = Synchronous(5, **kwargs)
        schedule.configure([10] * 20, seed=0)
        return schedule.client_sampling

    assert sampling() == RandomDraw(20, 5, False)
    assert sampling(speeds=Stragglers()) == RandomDraw(20, 5, False)
    assert sampling(sampling="size") is None
    assert sampling(availability=Bernoulli(0.1)) is None
    assert sampling(over_selection=1.2, speeds=Stragglers()) is None
