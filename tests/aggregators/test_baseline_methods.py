"""Requirements on every personalised and corrected method: engines, resume, absence, precision."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from flsuite import FlsuiteError
from flsuite.aggregators import (
    APFL,
    IFCA,
    MOON,
    Aggregator,
    Ditto,
    FedALA,
    FedAvg,
    FedBABU,
    FedBN,
    FedDyn,
    FedExP,
    FedNova,
    FedPer,
    FedProto,
    FedRep,
    FedRoD,
    LGFedAvg,
    PerFedAvg,
    PFedMe,
    QFedAvg,
)
from flsuite.engines import Processes
from flsuite.schedules import Synchronous
from tests.aggregators.federations import (
    assert_equal,
    assert_same_models,
    assert_same_tree,
    federation,
    run,
    table_data,
    table_model,
)
from tests.conftest import mostly_long

Make = Callable[[], Aggregator]
PERSONAL: dict[str, Make] = {
    "apfl": APFL,
    "ditto": Ditto,
    "fedala": FedALA,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedper": FedPer,
    "fedproto": FedProto,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "ifca": IFCA,
    "lgfedavg": LGFedAvg,
    "pfedme": partial(PFedMe, lam=2.0, steps=2),
}
SHARED: dict[str, Make] = {
    "feddyn": FedDyn,
    "fedexp": FedExP,
    "fednova": FedNova,
    "moon": MOON,
    "perfedavg": PerFedAvg,
    "perfedavg-hf": partial(PerFedAvg, order="hessian_free"),
    "qfedavg": QFedAvg,
}
EVERY = PERSONAL | SHARED
TWO_EPOCHS = {"max_epochs": 2}


FIRST = ("ditto", "fedala", "feddyn", "fedproto", "fedrod", "ifca", "moon", "perfedavg")


@pytest.mark.parametrize("make", mostly_long(EVERY, *FIRST))
def test_workers_and_a_resume_change_nothing(make: Make, tmp_path: Path) -> None:
    """Three of four clients train in each round."""
    settings: dict[str, Any] = {"schedule": Synchronous(0.75), **TWO_EPOCHS}
    whole = run(make(), 3, **settings)
    folder = str(tmp_path / "run")
    run(make(), 1, run_dir=folder, engine=Processes(workers=2), **settings)
    resumed = federation(make(), 3, run_dir=folder, **settings)
    resumed.fit(table_model(), table_data(), ckpt_path="last")
    assert not whole.federation.log.failures
    assert_same_models(whole, resumed)


@pytest.mark.parametrize("make", PERSONAL.values(), ids=PERSONAL)
def test_a_client_that_is_not_drawn_keeps_its_memory(make: Make) -> None:
    once, twice = (run(make(), n, schedule=Synchronous(1), seed=5, **TWO_EPOCHS) for n in (1, 2))
    (first,) = (update.client for update in once.federation.log.updates)
    (second,) = (update.client for update in twice.federation.log.updates)
    assert first != second
    assert_same_tree(once.federation.clients[first], twice.federation.clients[first])


@pytest.mark.parametrize("make", PERSONAL.values(), ids=PERSONAL)
def test_clients_are_scored_by_their_own_models(make: Make) -> None:
    """FedBABU's head is the same everywhere, and two clients may choose the same cluster."""
    made = run(make(), 2, **TWO_EPOCHS)
    assert made.federation.entries.personal
    one, other = (made.federation.client_state(client) for client in (0, 1))
    if make not in (FedBABU, IFCA):
        assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_others_have_one_model_that_fedavg_does_not_reach(make: Make) -> None:
    made, average = run(make(), 3, **TWO_EPOCHS), run(FedAvg(), 3, **TWO_EPOCHS)
    assert not made.federation.entries.personal
    state = average.federation.state
    assert any(not torch.equal(made.federation.state[name], state[name]) for name in state)


@pytest.mark.parametrize("make", mostly_long(EVERY, "ditto", "moon", "fedrod"))
def test_mixed_precision(make: Make) -> None:
    made = run(make(), 2, precision="bf16-mixed", **TWO_EPOCHS)
    assert not made.federation.log.failures


@pytest.mark.parametrize("make", mostly_long(EVERY, "apfl", "fedproto", "perfedavg"))
def test_lightnings_own_loop_ends_with_the_same_weights(make: Make) -> None:
    """A callback of the user is not known to work in the short loop."""
    whole = run(make(), 2, **TWO_EPOCHS)
    made = run(make(), 2, callbacks=[Callback()], **TWO_EPOCHS)
    assert_equal(whole.federation.client_state(0), made.federation.client_state(0))


def test_a_head_that_is_not_there_is_named() -> None:
    with pytest.raises(FlsuiteError, match="has no module 'fc'"):
        run(FedPer(head="fc"))
