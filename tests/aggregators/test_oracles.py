"""Every aggregator against an answer that was found without it, and against itself: resumed, elsewhere, with failures."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quadratic import Quadratic, Quadratics, federation, optimum
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from flsuite import FederatedTrainer, FederationError, FlsuiteError
from flsuite.aggregators import (
    SCAFFOLD,
    Aggregator,
    Centralized,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    LocalOnly,
)
from flsuite.data import DataSpec, Digits, Dirichlet, FederatedDataModule, Synthetic
from flsuite.engines import Processes
from flsuite.messages import POOLED, ClientContext, ClientUpdate
from flsuite.models import Classifier
from flsuite.models.backbones import MLP, Backbone
from flsuite.schedules import Synchronous
from flsuite.state import State, StateLayout, clone

CURVATURES, MINIMA = (1.0, 10.0), (0.0, 1.0)
EVERY: list[Callable[[], Aggregator]] = [
    FedAvg,
    FedAvgM,
    FedAdagrad,
    FedAdam,
    FedYogi,
    FedProx,
    SCAFFOLD,
    partial(SCAFFOLD, lr=0.5, weighting="samples", control="mean_gradient"),
    LocalOnly,
    Centralized,
]
SHARING = [make for make in EVERY if make not in (LocalOnly, Centralized)]


class Normalised(Backbone):
    """A network with BatchNorm, for tables."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)
        )


def table_data(clients: int = 4) -> FederatedDataModule:
    return Synthetic(
        features=5,
        classes=3,
        samples=150,
        clients=clients,
        partition=Dirichlet(0.5, min_samples=4),
        batch_size=16,
    )


def table_model(**settings: Any) -> Classifier:
    return Classifier(Normalised(), optimizer=partial(SGD, **{"lr": 0.05, **settings}))


def run(
    aggregator: Aggregator, rounds: int = 2, data: FederatedDataModule | None = None, **kwargs: Any
) -> FederatedTrainer:
    model = kwargs.pop("model", None) or table_model()
    trainer = federation(aggregator, rounds, **kwargs)
    trainer.fit(model, data or table_data())
    return trainer


def assert_equal(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def assert_same_models(a: FederatedTrainer, b: FederatedTrainer) -> None:
    """Bit for bit: the global model, what the server remembers, and the whole model of each client."""
    assert a.federation is not None
    assert b.federation is not None
    assert a.round == b.round
    assert a.federation.state or isinstance(a.aggregator, LocalOnly)
    for client in [None, *range(a.clients)]:
        assert_equal(a.federation.client_state(client), b.federation.client_state(client))
    assert a.aggregator.memory.keys() == b.aggregator.memory.keys()
    for slot, state in a.aggregator.memory.items():
        assert_equal(state, b.aggregator.memory[slot])


def update(client: int, state: State, samples: int = 1, **extras: Any) -> ClientUpdate:
    return ClientUpdate(client, 1, samples, 1, torch.tensor([samples]), state, extras)


def configured(aggregator: Aggregator, *parameters: str, clients: int = 2) -> Aggregator:
    aggregator.configure(StateLayout(parameters=parameters, clients=clients))
    return aggregator


def server_steps(
    aggregator: Aggregator, start: float, clients: Sequence[tuple[float, float]]
) -> list[float]:
    """The global number after each round, given what the two clients send in it."""
    configured(aggregator, "w")
    state = {"w": torch.tensor([start])}
    found = []
    for sent in clients:
        state = aggregator.aggregate(
            state, iter([update(i, {"w": torch.tensor([w])}) for i, w in enumerate(sent)])
        )
        found.append(float(state["w"]))
    return found


# FedAvg


def test_fedavg_on_two_quadratics_stops_where_the_drift_balances() -> None:
    """Client i maps w to ``m_i + r_i (w - m_i)``, ``r_i = (1 - lr a_i)^K``: the mean map has this fixed point."""
    reached = optimum(FedAvg(weighting="uniform"), Quadratics(CURVATURES, MINIMA), rounds=14)
    left = (1 - 0.05 * np.array(CURVATURES)) ** 10
    assert reached == pytest.approx(0.713442, abs=1e-4)
    assert reached == pytest.approx(((1 - left) @ MINIMA) / (1 - left).sum(), abs=1e-4)


def test_fedavg_weighs_by_samples_or_uniformly_and_counters_take_the_maximum() -> None:
    states = [
        {
            "w": torch.tensor([1.0, 2.0]),
            "bn.running_mean": torch.tensor([4.0]),
            "bn.num_batches_tracked": torch.tensor(7),
        },
        {
            "w": torch.tensor([5.0, 0.0]),
            "bn.running_mean": torch.tensor([0.0]),
            "bn.num_batches_tracked": torch.tensor(3),
        },
    ]
    before = copy.deepcopy(states)
    for weighting, w, mean in [("samples", [2.0, 1.5], 3.0), ("uniform", [3.0, 1.0], 2.0)]:
        aggregator = configured(FedAvg(weighting), "w")
        new = aggregator.aggregate(
            states[1], iter([update(0, states[0], 30), update(1, states[1], 10)])
        )
        assert new["w"].tolist() == w
        assert new["bn.running_mean"].tolist() == [mean]
        assert new["bn.num_batches_tracked"].item() == 7
        assert new["bn.num_batches_tracked"].dtype == torch.int64
    for state, old in zip(states, before, strict=True):
        assert_equal(state, old)


# Server optimizers


def test_fedavgm_without_momentum_is_fedavg() -> None:
    plain, server = run(FedAvg()), run(FedAvgM(lr=1.0, momentum=0.0))
    for name, value in plain.federation.state.items():
        torch.testing.assert_close(server.federation.state[name], value)


def test_fedavgm_by_hand() -> None:
    """Deltas 2 and 1: v = 2, then 0.5 * 2 + 1 = 2; the state moves by 0.1 v."""
    assert server_steps(
        FedAvgM(lr=0.1, momentum=0.5), 1.0, [(2.0, 4.0), (2.4, 2.0)]
    ) == pytest.approx([1.2, 1.4])


@pytest.mark.parametrize("method", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_server_optimizers_by_hand(method: type) -> None:
    """Against lines 11 to 15 of algorithm 2, written down once more."""
    lr, beta1, beta2, tau = 0.3, 0.6, 0.8, 0.01
    sent = [(1.0, 2.0), (-1.0, 0.5), (0.7, 0.6)]
    x, m, v, expected = 0.2, 0.0, tau**2, []
    for pair in sent:
        delta = np.mean(pair) - x
        m = beta1 * m + (1 - beta1) * delta
        if method is FedAdagrad:
            v = v + delta**2
        elif method is FedYogi:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + lr * m / (np.sqrt(v) + tau)
        expected.append(x)
    second = {} if method is FedAdagrad else {"beta2": beta2}
    assert server_steps(method(lr=lr, beta1=beta1, tau=tau, **second), 0.2, sent) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("make", [FedAvgM, FedAdagrad, FedAdam, FedYogi, SCAFFOLD])
def test_buffers_take_the_plain_mean(make: Callable[[], Aggregator]) -> None:
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


# The floor and the ceiling


def test_local_only_is_training_alone() -> None:
    data = Quadratics(CURVATURES, MINIMA)
    together = federation(LocalOnly(), 3, max_epochs=2)
    together.fit(Quadratic(), data)
    assert together.federation.state == {}
    assert all(u.bytes_up == 0 and u.bytes_down == 0 for u in together.federation.log.updates)
    alone = federation(FedAvg(), 3, max_epochs=2)
    alone.fit(Quadratic(), Quadratics(CURVATURES[:1], MINIMA[:1]))
    assert_equal(together.federation.client_state(0), alone.federation.client_state(0))
    left = (1 - 0.05 * 10.0) ** 6
    assert together.federation.client_state(1)["w"].item() == pytest.approx(1 - left)


def test_centralized_spends_the_cohorts_steps_on_the_pooled_data() -> None:
    data = Digits(clients=4, partition=Dirichlet(0.1, min_samples=4))
    settings = {"data": data, "schedule": Synchronous(0.5), "max_epochs": 2, "rounds": 5, "seed": 0}
    pooled = run(Centralized(), model=Classifier(MLP((16,))), **settings)
    cohort = run(FedAvg(), model=Classifier(MLP((16,))), **settings)
    (alone,) = pooled.federation.log.updates
    assert alone.client == POOLED
    assert alone.samples == sum(data.federated.samples(c) for c in range(4))
    assert alone.steps == sum(u.steps for u in cohort.federation.log.updates)
    assert pooled.test()[0]["accuracy"] > 0.85


# FedProx


def test_fedprox_stops_at_its_closed_form() -> None:
    """K steps from w on ``a / 2 (y - m)^2 + mu / 2 (y - w)^2`` end at ``y* + q^K (w - y*)``, with
    ``y* = (a m + mu w) / (a + mu)`` and ``q = 1 - lr (a + mu)``: an affine map, whose mean has the fixed point below.
    """
    lr, mu, steps = 0.05, 4.0, 10
    a, m = np.array(CURVATURES), np.array(MINIMA)
    left = (1 - lr * (a + mu)) ** steps
    slope = (1 - left) * mu / (a + mu) + left
    offset = (1 - left) * a * m / (a + mu)
    fixed = offset.mean() / (1 - slope.mean())
    assert abs(fixed - 0.713442) > 0.05
    reached = optimum(
        FedProx(mu=mu, weighting="uniform"), Quadratics(CURVATURES, MINIMA), rounds=35
    )
    assert reached == pytest.approx(fixed, abs=1e-4)


def test_fedprox_without_its_term_is_fedavg() -> None:
    def digits(aggregator: Aggregator) -> FederatedTrainer:
        data = Digits(clients=3, partition=Dirichlet(0.3, min_samples=4))
        return run(aggregator, data=data, model=Classifier(MLP((16,))))

    plain = digits(FedAvg())
    assert_same_models(plain, digits(FedProx(mu=0.0)))
    pulled = digits(FedProx(mu=0.1))
    assert not torch.equal(
        plain.federation.state["network.1.weight"], pulled.federation.state["network.1.weight"]
    )


def test_fedprox_leaves_private_parameters_alone() -> None:
    """With everything private the pull has nothing to act on."""

    class Alone(FedProx):
        private = ("*",)

    assert_same_models(run(LocalOnly()), run(Alone(mu=1.0)))


# SCAFFOLD


def scaffold(
    a: Sequence[float],
    m: Sequence[float],
    lr: float,
    steps: int,
    cohorts: Sequence[Sequence[int]],
    server_lr: float = 1.0,
) -> list[float]:
    """Algorithm 1, option II, for one number; the state after each round."""
    x, c, own, states = 0.0, 0.0, [0.0] * len(a), []
    for cohort in cohorts:
        moved, changed = [], []
        for i in cohort:
            y = x
            for _ in range(steps):
                y -= lr * (a[i] * (y - m[i]) - own[i] + c)
            renewed = own[i] - c + (x - y) / (steps * lr)
            moved.append(y - x)
            changed.append(renewed - own[i])
            own[i] = renewed
        x += server_lr * sum(moved) / len(cohort)
        c += sum(changed) / len(a)
        states.append(x)
    return states


@pytest.mark.parametrize("control", ["displacement", "mean_gradient"])
def test_scaffold_on_two_quadratics_finds_the_optimum(control: Any) -> None:
    reached = optimum(SCAFFOLD(control=control), Quadratics(CURVATURES, MINIMA), rounds=24)
    assert reached == pytest.approx(0.909091, abs=1e-5)


@pytest.mark.parametrize(
    ("curvatures", "lr", "control"),
    [
        ((1.0, 2.0, 5.0, 10.0), 1.0, "displacement"),
        ((1.0, -1.0, 5.0, float("inf")), 0.7, "mean_gradient"),
    ],
)
def test_scaffold_follows_algorithm_1(
    curvatures: tuple[float, ...], lr: float, control: Any
) -> None:
    """With half of the clients a round, and with clients that fail: one that raises, one whose update is refused."""
    minima = (0.0, 0.5, -1.0, 1.0)
    data = Quadratics(curvatures, minima)
    trainer = federation(SCAFFOLD(lr=lr, control=control), 1, max_epochs=5, schedule=Synchronous(3))
    model, states, cohorts = Quadratic(), [], []
    trainer.fit(model, data)
    for number in range(1, 9):
        if number > 1:
            trainer.federation.advance(trainer.engine, lambda *_: None)
        states.append(float(trainer.federation.state["w"]))
        cohorts.append([i for i in trainer.schedule.cohort(number) if 0 < curvatures[i] < np.inf])
        assert [u.client for u in trainer.federation.log.updates] == cohorts[-1]
    assert len({tuple(c) for c in cohorts}) > 1
    assert states == pytest.approx(scaffold(curvatures, minima, 0.05, 5, cohorts, lr), abs=1e-5)


def test_scaffold_finds_the_optimum_with_half_of_the_clients_a_round() -> None:
    a, m = np.array([1.0, 2.0, 5.0, 10.0]), np.array([0.0, 0.5, -1.0, 1.0])
    data, model = Quadratics(a.tolist(), m.tolist()), Quadratic(partial(SGD, lr=0.02))
    reached = optimum(SCAFFOLD(), data, rounds=45, model=model, schedule=Synchronous(0.5))
    assert reached == pytest.approx((a @ m) / a.sum(), abs=1e-4)


def test_both_controls_of_scaffold_agree_for_plain_sgd() -> None:
    """Over several epochs and batches a round, on a network with buffers."""
    settings = {"rounds": 3, "max_epochs": 2, "schedule": Synchronous(0.75)}
    written, mean = run(SCAFFOLD(), **settings), run(SCAFFOLD(control="mean_gradient"), **settings)
    for name, value in written.federation.state.items():
        torch.testing.assert_close(mean.federation.state[name], value, rtol=1e-3, atol=1e-5)
    for name, value in written.aggregator.memory["control"].items():
        torch.testing.assert_close(
            mean.aggregator.memory["control"][name], value, rtol=1e-3, atol=1e-5
        )
    assert written.aggregator.memory["control"].keys() == {
        n for n, _ in written._model.named_parameters()
    }


def test_scaffold_never_shares_memory_with_what_it_was_given() -> None:
    aggregator = configured(SCAFFOLD(), "w", clients=4)
    change = {"w": torch.tensor([2.0])}
    old = {"w": torch.zeros(1)}
    aggregator.aggregate(old, iter([update(0, {"w": torch.ones(1)}, control_change=change)]))
    sent = aggregator.broadcast()["control"]
    assert sent["w"].item() == 0.5
    aggregator.aggregate(old, iter([update(0, {"w": torch.ones(1)}, control_change=change)]))
    assert (sent["w"].item(), aggregator.memory["control"]["w"].item(), change["w"].item()) == (
        0.5,
        1.0,
        2.0,
    )


def test_scaffold_counts_the_steps_that_a_parameter_took() -> None:
    """A parameter that is frozen in some steps has their share of neither gradient nor displacement."""

    class Thawing(Quadratic):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if self.current_epoch >= 6 else loss.detach() + 0.0 * self.other

        def build(self, spec: DataSpec) -> None:
            super().build(spec)
            self.other = nn.Parameter(torch.zeros(()))

    data = Quadratics(CURVATURES, MINIMA)
    expected = scaffold(CURVATURES, MINIMA, 0.05, 4, [(0, 1)] * 3)[-1]
    for control in ("displacement", "mean_gradient"):
        assert optimum(SCAFFOLD(control=control), data, 3, model=Thawing()) == pytest.approx(
            expected, abs=1e-6
        )


class Scheduled(Quadratic):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, step_size=2)}


class TwoRates(Quadratic):
    def build(self, spec: DataSpec) -> None:
        super().build(spec)
        self.other = nn.Parameter(torch.zeros(()))

    def configure_optimizers(self) -> Optimizer:
        return SGD([{"params": [self.w]}, {"params": [self.other], "lr": 0.01}], lr=0.05)


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (Quadratic(partial(SGD, lr=0.05, momentum=0.9)), {}, "momentum 0.9"),
        (Quadratic(partial(SGD, lr=0.05, weight_decay=5e-4)), {}, "weight_decay 0.0005"),
        (Quadratic(partial(Adam, lr=0.05)), {}, "Adam"),
        (Scheduled(), {}, "0.05 and 0.005 in one fit"),
        (TwoRates(), {}, "0.05 and 0.01 in one fit"),
        (Quadratic(), {"gradient_clip_val": 1.0}, "gradient_clip_val"),
    ],
)
def test_scaffold_refuses_what_makes_the_displacement_lie(
    model: Quadratic, kwargs: Any, message: str
) -> None:
    data = Quadratics(CURVATURES, MINIMA)
    with pytest.raises(FlsuiteError, match=rf"{message}.*round 1, client 0.*'mean_gradient'"):
        optimum(SCAFFOLD(), data, 1, model=copy.deepcopy(model), **kwargs)
    assert np.isfinite(optimum(SCAFFOLD(control="mean_gradient"), data, 1, model=model, **kwargs))


def test_scaffold_with_momentum_and_decay_finds_the_optimum_of_the_decayed_loss() -> None:
    """Decay adds ``decay / 2 w^2`` to each client's loss; with the mean gradient as control it is counted once."""
    a, m, decay = np.array(CURVATURES), np.array(MINIMA), 0.5
    model = Quadratic(partial(SGD, lr=0.02, momentum=0.5, weight_decay=decay))
    reached = optimum(
        SCAFFOLD(control="mean_gradient"), Quadratics(CURVATURES, MINIMA), 40, model=model
    )
    assert reached == pytest.approx((a @ m) / (a + decay).sum(), abs=1e-4)


# All of them


@pytest.mark.parametrize("make", EVERY)
def test_a_resumed_run_ends_like_one_that_never_stopped(
    make: Callable[[], Aggregator], tmp_path: Path
) -> None:
    settings = {"schedule": Synchronous(0.75), "max_epochs": 2}
    whole = run(make(), 4, **settings)
    folder = str(tmp_path / "run")
    run(make(), 2, run_dir=folder, **settings)
    resumed = federation(make(), 4, run_dir=folder, **settings)
    resumed.fit(table_model(), table_data(), ckpt_path="last")
    assert_same_models(whole, resumed)


@pytest.mark.parametrize("make", [partial(FedProx, mu=1.0), SCAFFOLD])
def test_failures_processes_and_a_resume_change_nothing(
    make: Callable[[], Aggregator], tmp_path: Path
) -> None:
    """Three of five clients a round, one of which always raises and one of which sends no finite numbers."""

    def data() -> Quadratics:
        return Quadratics(
            (1.0, 3.0, 10.0, -1.0, float("inf")), (0.1, 0.5, 1.0, 0.0, 2.0), samples=(2, 1, 3, 1, 1)
        )

    settings = {"schedule": Synchronous(3), "max_epochs": 3}
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
    assert {i for r in range(1, 7) for i in whole.schedule.cohort(r)} >= {3, 4}


@pytest.mark.parametrize("make", SHARING)
def test_a_round_in_which_all_fail_keeps_the_state(make: Callable[[], Aggregator]) -> None:
    trainer = federation(make(), 1)
    with pytest.raises(FederationError, match="all 2 clients failed"):
        trainer.fit(Quadratic(), Quadratics((-1.0, -1.0), MINIMA))
    assert float(trainer.federation.state["w"]) == 0.0
    assert trainer.aggregator.memory == {}


@pytest.mark.parametrize("make", EVERY)
def test_aggregate_changes_nothing_that_it_was_given(make: Callable[[], Aggregator]) -> None:
    aggregator = configured(make(), "w", clients=3)
    old = {"w": torch.tensor([1.0]), "count": torch.tensor(1)}
    updates = [
        update(
            i,
            {"w": torch.tensor([2.0 + i]), "count": torch.tensor(3 - i)},
            2,
            control_change={"w": torch.ones(1)},
        )
        for i in range(2)
    ]
    before = clone(old), copy.deepcopy(updates)
    new = aggregator.aggregate(old, iter(updates))
    aggregator.aggregate(new, iter(updates))
    assert_equal(old, before[0])
    for now, then in zip(updates, before[1], strict=True):
        assert_equal(now.state, then.state)
        assert_equal(now.extras["control_change"], then.extras["control_change"])


@pytest.mark.parametrize("make", EVERY)
def test_only_one_update_is_held_at_a_time(make: Callable[[], Aggregator]) -> None:
    """Updates are consumed as they come, so that the memory of a round does not grow with its cohort."""
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
        assert order == ["sent", "read"] * 3


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
def test_a_bad_parameter_is_refused(make: Callable[[], Aggregator]) -> None:
    with pytest.raises(FlsuiteError, match="must be"):
        make()


def test_parameters_are_kept_under_their_names() -> None:
    """Configs, checkpoints and the command read them there."""
    assert vars(FedProx(0.5, "uniform")) == {"mu": 0.5, "weighting": "uniform"}
    assert vars(SCAFFOLD(0.5, "samples", "mean_gradient")) == {
        "lr": 0.5,
        "weighting": "samples",
        "control": "mean_gradient",
    }


def test_no_callback_where_there_is_nothing_to_do() -> None:
    client = ClientContext(0, 1, 1, torch.ones(1), {}, {}, {})
    assert FedAvg().client_callbacks(client) == []
    assert FedProx(mu=0.0).client_callbacks(client) == []
    assert len(FedProx(mu=0.1).client_callbacks(client)) == 1
