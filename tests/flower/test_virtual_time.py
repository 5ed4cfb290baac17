"""Schedules under Flower: a virtual clock is supported, schedules that lose clients are not."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flsuite.aggregators import FedAvg, FedBuff
from flsuite.common.errors import FlsuiteError
from flsuite.federation import Asynchronous, Schedule, Stragglers, Synchronous
from flsuite.flower.server import serve
from tests.conftest import classifier, equal_states, state, table, trainer
from tests.flower.grid import Nodes, both, node_app, unscaled

REFUSED = (
    "under Flower rounds are synchronous, and nodes come and go by themselves: set "
    "trainer.schedule to Synchronous without availability, over_selection and deadline"
)


@pytest.mark.parametrize(
    "schedule",
    [Asynchronous(2), Synchronous(deadline=1.0, speeds=Stragglers())],
    ids=["asynchronous", "deadline"],
)
def test_a_schedule_that_nodes_cannot_follow_is_refused(schedule: Schedule, tmp_path: Path) -> None:
    grid = Nodes(5, node_app(classifier))
    made = trainer(rounds=2, aggregator=FedBuff(), schedule=schedule, run_dir=tmp_path / "run")
    with pytest.raises(FlsuiteError) as refused:
        serve(grid, made, classifier(), unscaled())
    assert str(refused.value) == REFUSED
    assert not grid.answers and not (tmp_path / "run").exists()


def test_a_limit_of_updates_ends_the_run_too() -> None:
    ours, theirs, _ = both(classifier, FedAvg, rounds=None, max_client_updates=10)
    assert equal_states(state(ours), state(theirs)) and ours.round == theirs.round == 2


@pytest.mark.parametrize(
    ("limits", "rounds"), [({}, 3), ({"max_client_updates": 4}, 2)], ids=["rounds", "updates"]
)
def test_the_clock_is_that_of_our_own_engine(limits: dict[str, Any], rounds: int) -> None:
    schedule = {"schedule": Synchronous(2, speeds=Stragglers()), "rounds": 3, **limits}
    ours, theirs, grid = both(classifier, FedAvg, **schedule)
    assert equal_states(state(ours), state(theirs))
    assert ours.federation.clock == theirs.federation.clock
    assert (
        ours.federation.clock.round == rounds and ours.federation.clock.client_updates == 2 * rounds
    )
    assert ours.federation.clock.seconds > 0 and len(grid.answers) == 2 * rounds
    assert table(ours) == pytest.approx(table(theirs), abs=1e-9, nan_ok=True)
