"""A rule of flsuite for Flower clients that send arrays, without a run of flsuite."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flsuite import FlsuiteError
from flsuite.aggregators import CMGA, SCAFFOLD, FedAdam, FedAvg, FedNova, FedPer, Krum, QFedAvg
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout
from flsuite.flower.records import to_arrays, to_state
from flsuite.flower.rule_strategy import RuleStrategy
from tests.aggregators.federations import assert_equal, configured
from tests.flower.grid import Nodes

CLIENTS, ROUNDS = 5, 3
COUNTS = [[4, 0, 2], [0, 3, 1], [5, 5, 0], [1, 0, 0], [2, 2, 2]]
GROUPS = {"prior_mean": ["mu"], "prior_log_variance": ["log_variance"]}
START = {
    "net": torch.linspace(-1, 1, 6).reshape(2, 3),
    "mu": torch.tensor([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]]),
    "log_variance": torch.zeros(3, 2),
}


def trained(state: State, client: int) -> State:
    """Return what a client makes of the arrays, whatever it runs."""
    return {k: v + 0.1 * (client + 1) * torch.cos(v + client) for k, v in state.items()}


def app_of_ones_own(faulty: int | None = None) -> ClientApp:
    """Return an app that knows Flower and arrays alone."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        state = trained(to_state(message.content.array_records["arrays"]), client)
        if client == faulty:
            state["net"] = state["net"] * float("nan")
        numbers = {"num-examples": sum(COUNTS[client]), "class-counts": COUNTS[client]}
        return Message(
            RecordDict({"arrays": to_arrays(state), "metrics": MetricRecord(numbers)}),
            reply_to=message,
        )

    return app


def under_flower(strategy: RuleStrategy, rounds: int = ROUNDS, **kwargs: Any) -> Any:
    grid = Nodes(CLIENTS, app_of_ones_own(**kwargs))
    return strategy.start(grid, ArrayRecord(START), num_rounds=rounds)


def by_hand(part: Any, clients: tuple[int, ...] = (0, 1, 2, 3, 4)) -> State:
    half, state = configured(part, *START, clients=CLIENTS), START
    half.layout = StateLayout(
        tuple(START), CLIENTS, {name: tuple(value) for name, value in GROUPS.items()}
    )
    for round in range(1, ROUNDS + 1):
        updates = [
            ClientUpdate(c, round, sum(COUNTS[c]), 0, torch.tensor(COUNTS[c]), trained(state, c))
            for c in NODES_IN_ORDER
            if c in clients
        ]
        state = half.aggregate(state, updates)
    return state


# The grid numbers its nodes in another order than the clients.
NODES_IN_ORDER = sorted(range(CLIENTS), key=lambda client: client * 3 % CLIENTS)


@pytest.mark.parametrize(
    "make",
    [FedAvg, lambda: FedAdam(lr=0.1), lambda: Krum(1), CMGA],
    ids=["fedavg", "adam", "krum", "cmga"],
)
def test_it_is_the_rule_bit_for_bit(make: Any) -> None:
    result = under_flower(RuleStrategy(make(), GROUPS, fraction_evaluate=0.0))
    assert_equal(to_state(result.arrays), by_hand(make()))


def test_metrics_of_clients_and_of_the_rule_come_back() -> None:
    result = under_flower(RuleStrategy(CMGA(), GROUPS, fraction_evaluate=0.0))
    last = result.train_metrics_clientapp[ROUNDS]
    assert last["prior_distance_after"] >= last["prior_distance_before"]
    assert "prior_drift/0" in last


def test_an_answer_that_is_not_finite_is_left_out_and_named(caplog: Any) -> None:
    strategy = RuleStrategy(FedAvg(), fraction_evaluate=0.0)
    result = under_flower(strategy, faulty=2)
    assert_equal(to_state(result.arrays), by_hand(FedAvg(), (0, 1, 3, 4)))
    assert "net is not finite" in caplog.text


@pytest.mark.parametrize("make", [SCAFFOLD, FedNova, QFedAvg, FedPer])
def test_what_acts_on_the_clients_is_refused(make: Any) -> None:
    with pytest.raises(FlsuiteError, match=r"use flsuite\.flower\.app"):
        under_flower(RuleStrategy(make(), fraction_evaluate=0.0))


def test_priors_that_nobody_names_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="prior_mean"):
        under_flower(RuleStrategy(CMGA(), fraction_evaluate=0.0))


@pytest.mark.parametrize("fault", ["name", "metric", "samples", "counts", "share", "many"])
def test_an_answer_that_differs_is_left_out_and_does_not_end_the_run(fault: str) -> None:
    def tamper(round: int, client: int, answer: Message) -> Message:
        if client == 2:
            arrays, metrics = answer.content["arrays"], answer.content["metrics"]
            if fault == "name":
                arrays["other"] = arrays.pop("net")
            elif fault == "metric":
                metrics["more"] = 1.0
            elif fault == "samples":
                del metrics["num-examples"]
            elif fault in ("share", "many"):
                metrics["num-examples"] = 10**9 if fault == "share" else 2**60
            else:
                metrics["class-counts"] = [1]
        return answer

    grid = Nodes(CLIENTS, app_of_ones_own(), tamper)
    strategy = RuleStrategy(FedAvg(), max_share=0.5, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(START), num_rounds=ROUNDS)
    clients = (0, 1, 3, 4) if fault != "metric" else (0, 1, 2, 3, 4)
    assert_equal(to_state(result.arrays), by_hand(FedAvg(), clients))


def test_a_second_start_begins_anew() -> None:
    strategy = RuleStrategy(FedAdam(lr=0.1), fraction_evaluate=0.0)
    one, two = (under_flower(strategy) for _ in range(2))
    assert_equal(to_state(one.arrays), to_state(two.arrays))


def test_names_that_no_array_has_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="name nothing"):
        under_flower(RuleStrategy(FedAvg(), {"prior": ["nothing"]}, fraction_evaluate=0.0))


def test_the_example_of_clients_of_ones_own_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "configs/flower/own_clients")
    example = importlib.import_module("own_clients")
    strategy = RuleStrategy(CMGA(), example.GROUPS, fraction_evaluate=0.0)
    grid = Nodes(2, example.client_app)
    metrics = strategy.start(grid, example.shared(example.Model()), num_rounds=3)
    accuracy = [metrics.train_metrics_clientapp[round]["train_accuracy"] for round in (1, 3)]
    assert accuracy[1] > max(accuracy[0], 0.9)
    sent = {name for _, answer in grid.answers for name in answer.content.array_records["arrays"]}
    assert sent == {"mapper.weight", "mapper.bias", "mean", "log_variance"}, "no encoder"
