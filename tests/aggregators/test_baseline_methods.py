"""Requirements on every personalised and corrected method: engines, resume, absence, precision."""

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from flsuite import FederatedTrainer, FlsuiteError, aggregators as methods
from flsuite.callbacks import FederationCallback
from flsuite.federation import Processes, Synchronous
from flsuite.federation.client.plain import PlainLoop
from tests.aggregators.federations import (
    assert_same_models,
    assert_same_tree,
    federation,
    run,
    table_data,
    table_model,
)
from tests.conftest import mostly_long

Make = Callable[[], methods.Aggregator]
PERSONAL: dict[str, Make] = {
    "apfl": methods.APFL,
    "ditto": methods.Ditto,
    "fedala": methods.FedALA,
    "fedbabu": methods.FedBABU,
    "fedbn": methods.FedBN,
    "fedper": methods.FedPer,
    "fedproto": methods.FedProto,
    "fedrep": methods.FedRep,
    "fedrod": methods.FedRoD,
    "ifca": methods.IFCA,
    "lgfedavg": methods.LGFedAvg,
    "pfedme": partial(methods.PFedMe, lam=2.0, steps=2),
}
SHARED: dict[str, Make] = {
    "feddyn": methods.FedDyn,
    "fedexp": methods.FedExP,
    "fednova": methods.FedNova,
    "moon": methods.MOON,
    "perfedavg": methods.PerFedAvg,
    "perfedavg-hf": partial(methods.PerFedAvg, order="hessian_free"),
    "qfedavg": methods.QFedAvg,
}
EVERY = PERSONAL | SHARED
# Three of four clients train in each round. With this seed, the one that is absent from the second
# round has been in the first.
SETTINGS: dict[str, Any] = {"schedule": Synchronous(0.75), "max_epochs": 2, "seed": 3}


class Memories(FederationCallback):
    """Keeps who trains, and the memories of the clients after the first round."""

    def __init__(self) -> None:
        self.cohorts: list[set[int]] = []
        self.first: list[Any] = []

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        self.cohorts.append(set(clients))

    def on_round_end(self, run: Any, round: int) -> None:
        clients = run.federation.clients
        self.first = self.first or [copy.deepcopy(clients[client]) for client in range(4)]


@cache
def whole(make: Make) -> tuple[FederatedTrainer, Memories]:
    """Return two rounds of a method, fitted once for all tests."""
    seen = Memories()
    return run(make(), 2, callbacks=[seen], **SETTINGS), seen


FIRST = ("fedala", "feddyn", "fedproto")


@pytest.mark.parametrize("make", mostly_long(EVERY, *FIRST))
def test_workers_and_a_resume_change_nothing(make: Make, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run(make(), 1, run_dir=folder, engine=Processes(workers=2), **SETTINGS)
    resumed = federation(make(), 2, run_dir=folder, **SETTINGS)
    resumed.fit(table_model(), table_data(), ckpt_path="last")
    assert not whole(make)[0].federation.log.failures
    assert_same_models(whole(make)[0], resumed)


@pytest.mark.parametrize("make", PERSONAL.values(), ids=PERSONAL)
def test_a_client_that_is_not_drawn_keeps_its_memory(make: Make) -> None:
    made, seen = whole(make)
    (absent,) = seen.cohorts[0] - seen.cohorts[1]
    assert_same_tree(made.federation.clients[absent], seen.first[absent])


@pytest.mark.parametrize("make", PERSONAL.values(), ids=PERSONAL)
def test_clients_are_scored_by_their_own_models(make: Make) -> None:
    """FedBABU's head is the same everywhere, and two clients may choose the same cluster."""
    made, _ = whole(make)
    assert made.federation.entries.personal
    one, other = (made.federation.client_state(client) for client in (0, 1))
    if make not in (methods.FedBABU, methods.IFCA):
        assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_others_have_one_model_that_fedavg_does_not_reach(make: Make) -> None:
    (made, _), (average, _) = whole(make), whole(methods.FedAvg)
    assert not made.federation.entries.personal
    state = average.federation.state
    assert any(not torch.equal(made.federation.state[name], state[name]) for name in state)


@pytest.mark.parametrize("make", mostly_long(EVERY, "ditto", "moon"))
def test_mixed_precision(make: Make) -> None:
    made = run(make(), 2, precision="bf16-mixed", **SETTINGS)
    assert not made.federation.log.failures


class Users(Callback):
    """A callback of a user, which the short loop does not call."""

    def on_train_batch_end(self, *args: Any) -> None: ...


@pytest.mark.parametrize("make", mostly_long(EVERY, "apfl", "fedproto", "perfedavg"))
def test_lightnings_own_loop_ends_with_the_same_weights(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = whole(make)
    monkeypatch.delattr(PlainLoop, "fit")
    assert_same_models(expected, run(make(), 2, callbacks=[Users()], **SETTINGS))


def test_a_head_that_is_not_there_is_named() -> None:
    with pytest.raises(FlsuiteError, match="has no module 'fc'"):
        run(methods.FedPer(head="fc"))
