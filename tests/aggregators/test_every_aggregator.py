"""Requirements on every aggregator: resuming, failures, unchanged inputs."""

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from flsuite import FlsuiteError, aggregators as methods
from flsuite.aggregators import SCAFFOLD, Aggregator, FedAvg, FedBuff, FedProx, LocalOnly, Rule
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, clone
from flsuite.data import IID
from flsuite.federation import Synchronous
from flsuite.models import Classifier
from tests.aggregators.chains import federate
from tests.aggregators.federations import (
    MINIMA,
    Quadratic,
    Quadratics,
    Updates,
    assert_equal,
    assert_same_models,
    assert_same_tree,
    configured,
    federation,
    fold,
    run,
    signature,
    table_data,
    table_model,
    update,
)
from tests.conftest import mostly_long
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble

Make = Callable[[], Aggregator | Rule]
EVERY: dict[str, Make] = {
    "FedAvg": FedAvg,
    "FedAvgM": methods.FedAvgM,
    "FedAdagrad": methods.FedAdagrad,
    "FedAdam": methods.FedAdam,
    "FedYogi": methods.FedYogi,
    "FedProx": FedProx,
    "FedAsync": methods.FedAsync,
    "FedBuff": FedBuff,
    "FedBuff-mix": partial(FedBuff, "mix"),
    "SCAFFOLD": SCAFFOLD,
    "SCAFFOLD-mean": partial(SCAFFOLD, lr=0.5, weighting="samples", control="mean_gradient"),
    "FisherMerge": methods.FisherMerge,
    "LocalOnly": LocalOnly,
    "Centralized": methods.Centralized,
}
FIRST = ("FedAdam", "FedAsync", "FedBuff-mix", "SCAFFOLD-mean", "Centralized")
every_aggregator = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
# These need a chain of layers, or images.
ON_IMAGES: list[Make] = [
    methods.OTFusion,
    methods.PFNM,
    partial(methods.DENSE, epochs=1, generator_steps=2, batch_size=8, latent=8, width=0.1),
]


@pytest.mark.parametrize("make", mostly_long(EVERY, *FIRST))
def test_one_object_serves_several_runs_and_a_resumed_one_ends_like_one_that_never_stopped(
    make: Make, tmp_path: Path
) -> None:
    """An aggregator contains only settings. The run keeps the state. Updates carry its extras."""
    algorithm, seen = make(), Updates()
    settings: dict[str, Any] = {"schedule": Synchronous(0.75)}
    whole = run(algorithm, callbacks=[seen], **settings)
    folder = str(tmp_path / "run")
    run(algorithm, 1, run_dir=folder, **settings)
    resumed = federation(algorithm, 2, run_dir=folder, **settings)
    resumed.fit(table_model(), table_data(), ckpt_path="last")
    assert_same_models(whole, resumed)
    expected = whole.federation.uplink.statistics
    assert seen.all
    assert all(signature(update.extras) == signature(expected) for update in seen.all)


@pytest.mark.parametrize("make", [methods.FedAdam, methods.FedAsync, FedBuff, SCAFFOLD])
def test_a_round_in_which_all_fail_keeps_the_state(make: Make) -> None:
    trainer = federation(make(), 1)
    with pytest.raises(FlsuiteError, match="no client can train: client 0 failed before"):
        trainer.fit(Quadratic(), Quadratics((-1.0, -1.0), MINIMA))
    assert float(trainer.federation.state["w"]) == 0.0
    assert not any(trainer.federation.server.memory.values())


@every_aggregator
def test_aggregate_keeps_types_and_changes_nothing_that_it_was_given(make: Make) -> None:
    def sent(count: int) -> State:
        half = torch.full((2,), 1.0 + count, dtype=torch.bfloat16)
        return {"w": torch.tensor([1.0 + count]), "count": torch.tensor(count), "half": half}

    aggregator, old, one = configured(make(), "w", clients=3), sent(1), {"w": torch.ones(1)}
    extras = {"control_change": one, "fisher": one}
    updates = [update(i, sent(3 - i), 2, **copy.deepcopy(extras)) for i in range(2)]
    before = clone(old), copy.deepcopy(updates)
    new = aggregator.aggregate(old, iter(updates))
    assert signature(new) == signature(old)
    aggregator.aggregate(new, iter(updates))
    assert_equal(old, before[0])
    for now, then in zip(updates, before[1], strict=True):
        assert_equal(now.state, then.state)
        assert_same_tree(now.extras, then.extras)


@pytest.mark.parametrize("make", ON_IMAGES)
def test_methods_on_images_ask_nothing_of_clients_and_change_nothing_that_they_sent(
    make: Make,
) -> None:
    """A client sends only its model, and the method does nothing in its fit."""
    seen = Updates()
    trainer = federate(make(), callbacks=[seen])
    assert len(seen.all) == 3 and not any(update.extras for update in seen.all)
    assert trainer.federation.uplink.statistics == {}
    server, algorithm = trainer.federation.server, trainer.federation.aggregator
    assert algorithm.halves.trains_plainly and not algorithm.halves.measures

    state, before = clone(server.state), copy.deepcopy(seen.all)
    first, again = (fold(algorithm, server.state, seen.all, server=server) for _ in range(2))
    assert_equal(trainer.federation.state, state)
    assert_equal(first, again)
    for now, then in zip(seen.all, before, strict=True):
        assert_equal(now.state, then.state)


@every_aggregator
def test_only_one_update_is_held_at_a_time(make: Make) -> None:
    """The memory of a round does not grow with its cohort."""
    aggregator = configured(make(), "w")
    order: list[str] = []
    states: list[weakref.ref[Any]] = []

    class Held(dict):
        """A state that a weak reference can point to."""

    class Watched(ClientUpdate):
        def __getattribute__(self, name: str) -> Any:
            if name == "state":
                order.append("read")
            return super().__getattribute__(name)

    def sent(client: int) -> ClientUpdate:
        order.append("sent")
        # The loop variable of the aggregator holds the update before.
        assert sum(state() is not None for state in states) <= 1
        state, one = Held(w=torch.ones(1)), {"w": torch.ones(1)}
        states.append(weakref.ref(state))
        extras = {"control_change": one, "fisher": one}
        return Watched(client, 1, 1, 1, torch.ones(1), state, extras)

    aggregator.aggregate({"w": torch.zeros(1)}, map(sent, range(3)))
    if not isinstance(aggregator, LocalOnly):
        assert [event for event, _ in groupby(order)] == ["sent", "read"] * 3


@pytest.fixture
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize(
    "make",
    [
        partial(methods.FedProto, head="network.5."),
        partial(methods.RegMean, 0.5),
        partial(FedAvg, transforms=[methods.Quantize(8)]),
        partial(FedAvg, transforms=[methods.TopK(0.3)]),
    ],
    ids=["FedProto", "RegMean", "Quantize", "TopK"],
)
def test_a_run_may_have_float64_as_its_default(make: Make) -> None:
    data = Images(clients=3, partition=IID(), val_fraction=0.0)
    made = run(make(), 2, data, model=Classifier(InDouble(), partial(SGD, lr=0.01)))
    assert not made.federation.log.failures


def test_a_fit_is_plain_where_there_is_nothing_to_do() -> None:
    assert FedAvg().halves.trains_plainly
    assert FedProx(mu=0.0).halves.trains_plainly
    assert not FedProx(mu=0.1).halves.trains_plainly
