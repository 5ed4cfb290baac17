"""The flow's scores equal a computation by hand, and measuring them changes nothing."""

import math
from typing import Any

import pytest
import torch

from flsuite.aggregators import FedAvg, FisherAveraging
from flsuite.callbacks import FlowMonitor
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, cast, clone, load_, mean_of
from flsuite.data import Dirichlet, Synthetic, TaskSequence
from flsuite.federation import Synchronous
from flsuite.models import MLP, NFClassifier
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, equal_states, trainer


def fit(
    *callbacks: Any, aggregator: Any = FisherAveraging, data: Any = None, **kwargs: Any
) -> FederatedTrainer:
    made = trainer(**{"rounds": 2, **kwargs}, callbacks=[*callbacks], aggregator=aggregator())
    flow: dict[str, Any] = {"feature_dim": 6, "couplings": 2, "flow_width": 8}
    last = {"k_last": 0.0, "k_flow_last": 0.0}
    model = NFClassifier(**flow, **last, backbone=MLP(hidden=(8,)), lr=1e-2)
    partition = Dirichlet(0.5, min_samples=4)
    sizes: dict[str, Any] = {"features": 5, "classes": 3, "samples": 150, "clients": 3}
    made.fit(model, data or Synthetic(**sizes, partition=partition, batch_size=16))
    return made


def logged(made: FederatedTrainer) -> dict[tuple[int, str], float]:
    rows = [row for row in made.run.folder.table.rows if row[5:7] == ("global", "test")]
    return {(row[0], row[7]): row[8] for row in rows}


class Kept(FlowMonitor):
    """Keeps the clients' states of the last round, for the calculation by hand."""

    states: dict[int, tuple[State, int]]

    def on_round_start(self, *args: Any) -> None:
        super().on_round_start(*args)
        self.states = {}

    def on_client_end(self, trainer: FederatedTrainer, outcome: Any) -> None:
        super().on_client_end(trainer, outcome)
        self.states[outcome.update.client] = clone(outcome.update.state), outcome.update.samples


def test_the_numbers_by_hand() -> None:
    monitor = Kept(every=1, samples=10_000)
    made = fit(monitor)
    numbers = {name: value for (round, name), value in logged(made).items() if round == 2}
    federation, evaluator = made.federation, made.run.evaluator
    assert federation is not None
    test, new = federation.data.test, federation.state
    flow = [name for name in new if name.startswith("flow.") and new[name].is_floating_point()]

    def nll(state: State) -> torch.Tensor:
        load_(evaluator.model.state_dict(), {**new, **{name: state[name] for name in flow}})
        x = federation.data.scaling(test.x)
        with torch.no_grad():
            model: Any = evaluator.model.eval()
            return -model.log_likelihood((x, test.y)).double() / 6

    states = list(monitor.states.values())
    plain = cast(mean_of(states), states[0][0])
    assert numbers["flow_nll"] == pytest.approx(float(nll(new).mean()), rel=1e-5)
    assert numbers["flow_nll"] == pytest.approx(numbers["nll"], rel=1e-5)
    assert numbers["flow_nll_of_mean"] == pytest.approx(float(nll(plain).mean()), rel=1e-5)
    assert numbers["flow_nll"] != numbers["flow_nll_of_mean"]
    columns = torch.stack([nll(state) for state, _ in monitor.states.values()])
    disagreement = float(columns.std(0, correction=0).mean())
    assert numbers["flow_disagreement"] == pytest.approx(disagreement, rel=1e-4)
    own = [(federation.data.class_counts(client) > 0)[test.y] for client in monitor.states]
    before = sum(float(column[rows].mean()) for column, rows in zip(columns, own, strict=True)) / 3
    assert numbers["flow_nll_before"] == pytest.approx(before, rel=1e-5)
    after = sum(float(nll(new)[rows].mean()) for rows in own) / 3
    assert numbers["flow_nll_after"] == pytest.approx(after, rel=1e-5)
    for name, center in (("flow_spread", plain), ("flow_spread_after", new)):
        away = [(own[n].double() - center[n]).flatten() for own, _ in states for n in flow]
        expected = math.sqrt(float(torch.cat(away).square().mean()))
        assert numbers[name] == pytest.approx(expected, rel=1e-5)
    assert 0 <= numbers["sample_agreement"] <= 1


def test_under_fedavg_the_aggregate_is_the_mean() -> None:
    numbers = logged(fit(FlowMonitor(every=1), aggregator=FedAvg))
    assert numbers[2, "flow_nll"] == numbers[2, "flow_nll_of_mean"]
    assert numbers[2, "flow_spread"] == numbers[2, "flow_spread_after"]


def test_it_is_measured_when_asked_and_changes_nothing() -> None:
    monitor = FlowMonitor(every=2, samples=20, clients=1)
    plain, watched = fit(rounds=3), fit(monitor, rounds=3)
    assert plain.federation is not None and watched.federation is not None
    assert equal_states(plain.federation.state, watched.federation.state)
    assert [round for round, name in logged(watched) if name == "flow_nll"] == [2, 3]


def test_held_out_are_the_classes_met_so_far() -> None:
    monitor = FlowMonitor(every=1, samples=10_000)
    data = TaskSequence(
        Synthetic(features=5, classes=4, samples=200, clients=2, batch_size=16), 2, 2, 1, "disjoint"
    )
    numbers = logged(fit(monitor, data=data))
    for round in (1, 2):
        assert numbers[round, "flow_nll"] == pytest.approx(numbers[round, "nll"], rel=1e-5)


def test_a_round_without_clients_is_not_measured() -> None:
    schedule = Synchronous(participation=0.3, sampling="poisson")
    made = fit(FlowMonitor(every=1), aggregator=FedAvg, rounds=6, schedule=schedule)
    rows = made.run.folder.table.rows
    trained = {row.round for row in rows if row.metric == "clients" and row.value > 0}
    assert 0 < len(trained) < 6
    assert {round for round, name in logged(made) if name == "flow_nll"} == trained


def test_models_without_a_flow_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="Classifier has none"):
        trainer(rounds=1, callbacks=[FlowMonitor()]).fit(classifier(), digits())
    for settings in ({"every": 0}, {"samples": 1}, {"clients": 0}):
        with pytest.raises(FlsuiteError, match=f"FlowMonitor: {next(iter(settings))}"):
            FlowMonitor(**settings)
