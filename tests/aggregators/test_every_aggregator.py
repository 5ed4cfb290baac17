"""Requirements on every aggregator: resuming, failures, unchanged inputs, refusals."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite import FlsuiteError
from flsuite.aggregators import (
    DENSE,
    PFNM,
    SCAFFOLD,
    Aggregator,
    Centralized,
    FedAdagrad,
    FedAdam,
    FedAsync,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedProx,
    FedYogi,
    FisherMerge,
    LocalOnly,
    OTFusion,
    Rule,
)
from flsuite.engines import Processes
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.runs.settings import describe
from flsuite.schedules import Clock, Synchronous
from flsuite.state import clone
from tests.aggregators.chains import federate
from tests.aggregators.federations import (
    MINIMA,
    Quadratic,
    Quadratics,
    Updates,
    assert_equal,
    assert_same_models,
    configured,
    federation,
    fold,
    run,
    signature,
    table_data,
    table_model,
    update,
)

Make = Callable[[], Aggregator | Rule]
EVERY: list[Make] = [
    FedAvg,
    FedAvgM,
    FedAdagrad,
    FedAdam,
    FedYogi,
    FedProx,
    FedAsync,
    FedBuff,
    partial(FedBuff, "mix"),
    SCAFFOLD,
    partial(SCAFFOLD, lr=0.5, weighting="samples", control="mean_gradient"),
    FisherMerge,
    LocalOnly,
    Centralized,
]
# FisherMerge refuses the model whose fits fail, which has no logits.
SHARING = [make for make in EVERY if make not in (FisherMerge, LocalOnly, Centralized)]
# These need a chain of layers, or images.
ON_IMAGES: list[Make] = [
    OTFusion,
    PFNM,
    partial(DENSE, epochs=1, generator_steps=2, batch_size=8, latent=8, width=0.1),
]


@pytest.mark.parametrize("make", [FedAvgM, FedAdagrad, FedAdam, FedYogi, SCAFFOLD])
def test_buffers_take_the_plain_mean(make: Make) -> None:
    aggregator = configured(make(), "w")
    old = {"w": torch.zeros(1), "mean": torch.zeros(1), "count": torch.tensor(0)}
    updates = [
        update(
            i,
            {"w": torch.ones(1), "mean": torch.tensor([m]), "count": torch.tensor(n)},
            control_change={"w": torch.ones(1)},
        )
        for i, (m, n) in enumerate([(1.0, 5), (4.0, 2)])
    ]
    new = aggregator.aggregate(old, iter(updates))
    assert (new["mean"].item(), new["count"].item()) == (2.5, 5)
    assert old["w"].item() == 0.0


@pytest.mark.parametrize("make", EVERY)
def test_a_resumed_run_ends_like_one_that_never_stopped(make: Make, tmp_path: Path) -> None:
    settings = {"schedule": Synchronous(0.75)}
    whole = run(make(), 3, **settings)
    folder = str(tmp_path / "run")
    run(make(), 1, run_dir=folder, **settings)
    resumed = federation(make(), 3, run_dir=folder, **settings)
    resumed.fit(table_model(), table_data(), ckpt_path="last")
    assert_same_models(whole, resumed)


@pytest.mark.parametrize("make", [partial(FedProx, mu=1.0), SCAFFOLD])
def test_failures_processes_and_a_resume_change_nothing(make: Make, tmp_path: Path) -> None:
    """Three of five clients per round; one always raises, one sends numbers that are not finite."""

    def data() -> Quadratics:
        return Quadratics(
            (1.0, 3.0, 10.0, -1.0, float("inf")), (0.1, 0.5, 1.0, 0.0, 2.0), samples=(2, 1, 3, 1, 1)
        )

    settings = {"schedule": Synchronous(3)}
    whole = run(make(), 6, data(), model=Quadratic(), **settings)
    folder = str(tmp_path / "run")
    run(
        make(),
        3,
        data(),
        model=Quadratic(),
        run_dir=folder,
        engine=Processes(workers=2),
        **settings,
    )
    resumed = federation(make(), 6, run_dir=folder, engine=Processes(workers=2), **settings)
    resumed.fit(Quadratic(), data(), ckpt_path="last")
    assert_same_models(whole, resumed)
    assert [f.client for f in whole.federation.log.failures] == [
        f.client for f in resumed.federation.log.failures
    ]
    drawn = [fit.client for r in range(1, 7) for fit in whole.schedule.start(Clock(r - 1))]
    assert {*drawn} >= {3, 4}


@pytest.mark.parametrize("make", SHARING)
def test_a_round_in_which_all_fail_keeps_the_state(make: Make) -> None:
    trainer = federation(make(), 1)
    with pytest.raises(FlsuiteError, match="no client can train: client 0 failed before"):
        trainer.fit(Quadratic(), Quadratics((-1.0, -1.0), MINIMA))
    assert float(trainer.federation.state["w"]) == 0.0
    assert not any(trainer.federation.server.memory.values())


@pytest.mark.parametrize("make", EVERY)
def test_aggregate_changes_nothing_that_it_was_given(make: Make) -> None:
    aggregator = configured(make(), "w", clients=3)
    old = {"w": torch.tensor([1.0]), "count": torch.tensor(1)}
    updates = [
        update(
            i,
            {"w": torch.tensor([2.0 + i]), "count": torch.tensor(3 - i)},
            2,
            control_change={"w": torch.ones(1)},
            fisher={"w": torch.ones(1)},
        )
        for i in range(2)
    ]
    before = clone(old), copy.deepcopy(updates)
    new = aggregator.aggregate(old, iter(updates))
    aggregator.aggregate(new, iter(updates))
    assert_equal(old, before[0])
    for now, then in zip(updates, before[1], strict=True):
        assert_equal(now.state, then.state)
        for name in ("control_change", "fisher"):
            assert_equal(now.extras[name], then.extras[name])


@pytest.mark.parametrize("make", ON_IMAGES)
def test_aggregate_changes_nothing_of_a_round_on_images(make: Make) -> None:
    seen = Updates()
    trainer = federate(make(), callbacks=[seen])
    state, before = clone(trainer.federation.state), copy.deepcopy(seen.all)
    server, algorithm = trainer.federation.server, trainer.federation.aggregator
    first, again = (fold(algorithm, server.state, seen.all, server=server) for _ in range(2))
    assert_equal(trainer.federation.state, state)
    assert_equal(first, again)
    for now, then in zip(seen.all, before, strict=True):
        assert_equal(now.state, then.state)


@pytest.mark.parametrize("make", ON_IMAGES)
def test_methods_on_images_ask_nothing_of_clients(make: Make) -> None:
    """A client sends only its model, and its fit has no callback of the method."""
    seen = Updates()
    trainer = federate(make(), callbacks=[seen])
    client = ClientContext(0, 1, 1, torch.ones(1), trainer.federation.state, {}, {})
    assert trainer.federation.aggregator.callbacks(client) == []
    assert trainer.federation.uplink.statistics == {}
    assert len(seen.all) == 3 and not any(update.extras for update in seen.all)


@pytest.mark.parametrize("make", EVERY)
def test_one_object_serves_several_runs_whose_updates_carry_its_extras(make: Make) -> None:
    """An aggregator contains only settings. The run keeps the state."""
    algorithm, seen = make(), Updates()
    first, second = run(algorithm, callbacks=[seen]), run(algorithm)
    assert_same_models(first, second)
    expected = first.federation.uplink.statistics
    assert seen.all
    assert all(signature(update.extras) == signature(expected) for update in seen.all)


@pytest.mark.parametrize("make", [make for make in EVERY if make is not FisherMerge])
def test_only_one_update_is_held_at_a_time(make: Make) -> None:
    """The memory of a round does not grow with its cohort."""
    aggregator = configured(make(), "w")
    order: list[str] = []

    class Watched(ClientUpdate):
        def __getattribute__(self, name: str) -> Any:
            if name == "state":
                order.append("read")
            return super().__getattribute__(name)

    def stream() -> Iterator[ClientUpdate]:
        for i in range(3):
            order.append("sent")
            state = {"w": torch.ones(1)}
            yield Watched(
                i, 1, 1, 1, torch.ones(1), state, {"control_change": {"w": torch.ones(1)}}
            )

    aggregator.aggregate({"w": torch.zeros(1)}, stream())
    if not isinstance(aggregator, LocalOnly):
        assert [event for event, _ in groupby(order)] == ["sent", "read"] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedProx(mu=-0.1),
        lambda: FedProx(mu=float("nan")),
        lambda: FedProx(mu=float("inf")),
        lambda: SCAFFOLD(lr=0.0),
        lambda: SCAFFOLD(lr=float("nan")),
        lambda: SCAFFOLD(control="option_one"),
        lambda: FedAvgM(lr=0.0),
        lambda: FedAvgM(momentum=1.0),
        lambda: FedAvgM(momentum=-0.1),
        lambda: FedAdam(lr=-1.0),
        lambda: FedAdam(beta1=1.0),
        lambda: FedAdam(beta2=-0.1),
        lambda: FedYogi(beta2=1.0),
        lambda: FedYogi(tau=0.0),
        lambda: FedAdagrad(tau=-1e-3),
        lambda: FedAdagrad(beta1=-0.5),
    ],
)
def test_a_bad_parameter_is_refused(make: Make) -> None:
    with pytest.raises(FlsuiteError, match="must be"):
        make()


def test_a_config_says_what_was_given() -> None:
    """Configs, checkpoints and the command read it there."""

    def kept(aggregator: Aggregator, **given: Any) -> bool:
        return given.items() <= describe(aggregator)["init_args"].items()

    assert kept(FedProx(0.5, "uniform"), mu=0.5, weighting="uniform")
    scaffold = SCAFFOLD(0.5, "samples", "mean_gradient")
    assert kept(scaffold, lr=0.5, weighting="samples", control="mean_gradient")


def test_no_callback_where_there_is_nothing_to_do() -> None:
    client = ClientContext(0, 1, 1, torch.ones(1), {}, {}, {})
    assert FedAvg().callbacks(client) == []
    assert FedProx(mu=0.0).callbacks(client) == []
    assert len(FedProx(mu=0.1).callbacks(client)) == 1
