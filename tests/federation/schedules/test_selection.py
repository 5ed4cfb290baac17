"""Client selection by earlier updates: its rules, resume, engines, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import FedAvg
from flsuite.callbacks import FederationCallback
from flsuite.common.messages import ClientFailure, ClientUpdate
from flsuite.federation import (
    Always,
    Bernoulli,
    Clock,
    LogNormal,
    Oort,
    PowerOfChoice,
    Processes,
    Selection,
    Synchronous,
)
from flsuite.federation.schedules.base import Measured
from flsuite.federation.schedules.launcher import Launcher
from flsuite.runs.rounds import rehearse
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_same_models,
    federation,
    run,
    table_data,
    table_model,
)

SIZES = [10, 20, 30, 40, 50, 60]
MAKES: dict[str, Callable[[], Selection]] = {"power": PowerOfChoice, "oort": Oort}


class _Failures(FederationCallback):
    """Counts the fits that fail."""

    number = 0

    def on_client_end(self, trainer: Any, outcome: Any) -> None:
        self.number += isinstance(outcome, ClientFailure)


class _Away(Always):
    """Half of the clients are away."""

    def available(self, seconds: float) -> np.ndarray:
        return np.array([True, False] * 3)


def configured(selection: Selection, cohort: int = 2) -> tuple[Selection, Launcher]:
    selection.configure(SIZES, cohort)
    return selection, Launcher(Measured(), None, SIZES, 3, None)


def tell(selection: Selection, losses: list[float], round: int = 1, seconds: float = 0.0) -> None:
    for client, loss in enumerate(losses):
        counts = torch.ones(1, dtype=torch.int64)
        update = ClientUpdate(client, round, SIZES[client], 1, counts, {}, metrics={"loss": loss})
        selection.arrived(update, seconds * (client + 1))


def test_of_some_candidates_those_with_the_highest_loss() -> None:
    selection, launcher = configured(PowerOfChoice(3))
    for round in range(1, 20):
        tell(selection, [0.1, 0.9, 0.5, 0.7, 0.2, 0.3])
        drawn = launcher.draw(3, Clock(round), 0, weights=selection.sizes)
        best = sorted(sorted(drawn, key=lambda c: -selection.last[c][0])[:2])
        assert selection.choose(2, Clock(round), launcher, 0) == best


def test_a_client_that_fails_comes_last_until_it_answers() -> None:
    selection, launcher = configured(PowerOfChoice(1.0))
    tell(selection, [0.1, 0.2, 0.3])
    assert selection.choose(2, Clock(1), launcher, 0) == [3, 4], "new clients come first"
    selection.silent |= {3: 1, 4: 1}
    tell(selection, [0.1, 0.2, 0.3, 0.4])
    assert selection.choose(2, Clock(2), launcher, 0) == [3, 5], "client 4 has failed"
    selection.silent |= {3: 2, 5: 2}
    again, _ = configured(PowerOfChoice(1.0))
    again.load_state_dict(selection.state_dict())
    assert again.choose(3, Clock(3), launcher, 0) == [0, 1, 2]


@pytest.mark.parametrize("make", [lambda: PowerOfChoice(5), lambda: Oort(0.5)])
def test_clients_that_always_fail_do_not_fill_the_rounds(make: Callable[[], Selection]) -> None:
    data = Quadratics((1.0, -1.0, 1.0, -1.0, 1.0, 1.0), (0.0,) * 6)
    failed = _Failures()
    schedule = Synchronous(3, sampling=make())
    federation(FedAvg(), 20, schedule=schedule, callbacks=[failed]).fit(Quadratic(), data)
    assert 2 <= failed.number < 12, "three a round, twenty rounds"


@pytest.mark.parametrize(("share", "number"), [(0.07, 7), (0.55, 55), (0.071, 8)])
def test_a_share_is_rounded_up_from_the_exact_number(share: float, number: int) -> None:
    selection = PowerOfChoice(share)
    selection.configure([1] * 100, 1)
    assert selection._number == number


def test_the_utility_grows_with_samples_loss_and_age_and_falls_with_time() -> None:
    oort, launcher = configured(Oort(exploration=0.0, preferred_seconds=4.0))
    tell(oort, [1.0] * 6, seconds=1.0)
    utilities = oort._utilities(range(6), 5)
    age = (0.1 * torch.tensor(5.0).log()).sqrt().item() * 60
    assert utilities[0] == pytest.approx(10 + age)
    assert utilities[3] == pytest.approx(40 + age), "four seconds are the preferred ones"
    assert utilities[5] == pytest.approx((60 + age) * (4 / 6) ** 2)
    assert oort.choose(2, Clock(4), launcher, 0) == [2, 3]


def test_a_share_of_the_cohort_is_new() -> None:
    oort, launcher = configured(Oort(exploration=0.5), cohort=2)
    tell(oort, [5.0, 1.0, 9.0])
    chosen = oort.choose(2, Clock(1), launcher, 0)
    assert 2 in chosen
    assert sum(client > 2 for client in chosen) == 1


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_engines_and_a_resume_choose_the_same_clients(
    make: Callable[[], Selection], tmp_path: Path
) -> None:
    def settings() -> dict[str, Any]:
        return {"schedule": Synchronous(2, sampling=make(), speeds=LogNormal())}

    whole = run(FedAvg(), 4, **settings())
    folder = str(tmp_path / "run")
    run(FedAvg(), 2, run_dir=folder, engine=Processes(workers=2), **settings())
    resumed = federation(FedAvg(), 4, run_dir=folder, **settings())
    resumed.fit(table_model(), table_data(), ckpt_path="last")
    assert_same_models(whole, resumed)
    assert whole.schedule.state_dict() == resumed.schedule.state_dict()


def test_a_client_with_a_far_minimum_is_chosen_more_often() -> None:
    def reached(sampling: Any) -> float:
        made = federation(FedAvg("uniform"), 30, schedule=Synchronous(1, sampling=sampling))
        made.fit(Quadratic(), Quadratics((1.0,) * 5, (0.0, 0.0, 0.0, 0.0, 5.0)))
        return float(made.federation.state["w"])

    assert reached(PowerOfChoice(1.0)) > reached("uniform")


def test_clients_that_are_away_are_not_chosen() -> None:
    settings = {"availability": Bernoulli(0.5), "speeds": LogNormal()}
    made = run(FedAvg(), 6, schedule=Synchronous(1, sampling=Oort(), **settings))
    assert made.round == 6
    oort, launcher = configured(Oort())
    tell(oort, [1.0] * 6)
    launcher.availability = _Away()
    assert oort.choose(2, Clock(1), launcher, 0) == [2, 4]


def test_there_is_no_schedule_without_training() -> None:
    made = federation(FedAvg(), 2, schedule=Synchronous(2, sampling=Oort(), speeds=LogNormal()))
    prepared = made.prepare(table_model(), table_data())
    with pytest.raises(FlsuiteError, match="depend on what others have sent"):
        list(rehearse(prepared))


def test_fewer_candidates_than_clients_per_round_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="set candidates between them"):
        run(FedAvg(), schedule=Synchronous(3, sampling=PowerOfChoice(2)))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_late_client_has_not_failed(make: Callable[[], Selection]) -> None:
    schedule = Synchronous(2, sampling=make(), over_selection=1.5, speeds=LogNormal())
    made = run(FedAvg(), 6, table_data(6), schedule=schedule)
    assert made.schedule.metrics()["late"] > 0
    assert made.schedule.sampling.silent == {}


def test_of_those_that_failed_the_one_chosen_longest_ago_comes_first() -> None:
    oort, launcher = configured(Oort(exploration=0.0))
    oort.silent = {0: 4, 1: 2, 2: 3, 3: 4, 4: 4, 5: 4}
    assert oort.choose(2, Clock(5), launcher, 0) == [1, 2]
