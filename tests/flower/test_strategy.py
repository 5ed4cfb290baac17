"""Under Flower, a federation ends with the same weights and scores as on flsuite's engine."""

from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import ArrayRecord

from flsuite.aggregators import (
    CMGA,
    SCAFFOLD,
    Bucketing,
    CenteredClipping,
    DPFedAvg,
    FedAvg,
    FedFisher,
    PairwiseMasks,
    TopK,
)
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.federation import Synchronous
from flsuite.federation.client.callbacks import ExponentialDecay
from flsuite.flower.records import to_arrays, to_state
from flsuite.flower.server import FlowerStrategy, serve
from tests.aggregators.test_baseline_methods import EVERY
from tests.conftest import classifier, equal_states, mostly_long, state, table, trainer
from tests.flower.grid import (
    Nodes,
    autoencoder,
    both,
    convolution,
    fused,
    many,
    node_app,
    personal,
    plain,
    tasks,
    unscaled,
)
from tests.test_plain_models import sentences

PERSONAL = "ditto", "ifca"
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "scaffold_three_of_five": (classifier, SCAFFOLD, {"rounds": 3, "schedule": Synchronous(0.6)}),
    "kept_optimizers_falling_rate": (
        convolution,
        FedAvg,
        {"batchnorm": "reset", "keep_optimizers": True, "lr_decay": ExponentialDecay(gamma=0.5)},
    ),
    "private_encoder_two_of_five": (
        fused,
        FedAvg,
        {"rounds": 3, "schedule": Synchronous(2), "score_clients": 3, "evaluate_every": 2},
    ),
    "cmga": (autoencoder, CMGA, {}),
    "sums_of_parts": (classifier, FedAvg, {"data": many, "clients": 46}),
    "any_module": (plain, FedAvg, {"data": lambda: sentences(clients=5)}),
    "fedfisher": (classifier, FedFisher, {}),
    "bucketing": (classifier, lambda: Bucketing(CenteredClipping()), {"rounds": 3}),
    "top_k": (classifier, FedAvg, {"rounds": 3, "compression": TopK(0.1)}),
    "dp_fedavg_three_of_five": (
        classifier,
        lambda: DPFedAvg(clip=0.3, noise_multiplier=1.0, quantile=0.5),
        {"rounds": 3, "schedule": Synchronous(3)},
    ),
} | {name: (classifier, EVERY[name], {"max_epochs": 2}) for name in PERSONAL}


FAST = "scaffold_three_of_five", "fedfisher", "bucketing", "dp_fedavg_three_of_five", "ditto"


@pytest.mark.parametrize("case", mostly_long(CASES, *FAST))
def test_the_same_weights_and_scores_as_our_own_engine(
    case: tuple[Any, Any, dict[str, Any]],
) -> None:
    model, algorithm, kwargs = case
    ours, theirs, _ = both(model, algorithm, **kwargs)
    assert equal_states(state(ours), state(theirs))
    mine, yours = table(ours), table(theirs)
    assert mine.keys() == yours.keys()
    assert all(mine[key] == pytest.approx(yours[key], abs=1e-9, nan_ok=True) for key in mine)


def test_tasks_of_models_that_stay_on_their_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """Check that the federation continues without the matrix, which needs every whole model."""
    ours, theirs, _ = both(personal, FedAvg, data=tasks)
    assert equal_states(state(ours), state(theirs))
    assert "no accuracy by task" in caplog.text
    assert not any("task_accuracy" in key[3] for key in table(theirs)) and any(
        "task_accuracy" in key[3] for key in table(ours)
    )


@pytest.mark.parametrize("model", [classifier, personal], ids=["shared", "private_head"])
def test_a_run_that_stops_early_leaves_the_other_rounds_out(model: Any) -> None:
    class Stops(FederationCallback):
        def on_evaluation_end(self, run: Any, round: int, split: str, scores: Any) -> None:
            if round == 2:
                run.stop()

    ours, theirs, grid = both(model, FedAvg, rounds=5, callbacks=[Stops()])
    assert ours.round == theirs.round == 2 and len(grid.answers) == 10
    assert table(ours) == pytest.approx(table(theirs), nan_ok=True)
    assert any(key[3].startswith("accuracy/") for key in table(theirs)), "details of the last round"


def test_a_last_round_that_cannot_be_scored_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Stops(FederationCallback):
        def on_round_end(self, run: Any, round: int) -> None:
            run.stop()

    made = trainer(rounds=5, evaluate_every=2, callbacks=[Stops()])
    serve(Nodes(5, node_app(personal)), made, personal(), unscaled())
    assert made.round == 1 and "round 1: not scored on test data" in caplog.text


def test_the_strategy_works_with_flowers_own_start() -> None:
    ours = trainer(rounds=3)
    ours.fit(classifier(), unscaled())
    run = trainer(rounds=1).prepare(classifier(), unscaled())
    strategy, grid = FlowerStrategy(run), Nodes(5, node_app(classifier))
    first = strategy.start(grid, strategy.initial_arrays(), num_rounds=2)
    second = strategy.start(grid, first.arrays, num_rounds=1)
    assert equal_states(dict(second.arrays.to_torch_state_dict()), state(ours))
    losses = {
        row[0]: row[8]
        for row in ours.run.folder.table.rows
        if row[5:8] == ("global", "train", "loss")
    }
    assert first.train_metrics_clientapp[2]["loss"] == pytest.approx(losses[2])


def test_training_starts_from_the_arrays_that_it_is_given() -> None:
    run = trainer().prepare(classifier(), unscaled())
    strategy, grid = FlowerStrategy(run), Nodes(5, node_app(classifier))
    zeros = to_arrays(
        {name: torch.zeros_like(value) for name, value in run.federation.state.items()}
    )
    result = strategy.start(grid, zeros, num_rounds=1)
    first, *_ = to_state(result.arrays).values()
    assert not first.any(), "a network of zeros with ReLUs learns nothing in its first layer"
    with pytest.raises(FlsuiteError, match="initial_arrays are not this model's: lacks"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"secure_sum": PairwiseMasks()}, "a round of Flower has one message to a node"),
        ({"keep_updates": True, "enable_checkpointing": True}, "models are on their nodes"),
        ({"schedule": Synchronous(0.5, sampling="poisson")}, "a round without a client"),
    ],
)
def test_what_a_round_of_flower_has_no_messages_for_is_repersonal(
    kwargs: dict[str, Any], message: str, tmp_path: Any
) -> None:
    made = trainer(aggregator=FedAvg(), rounds=1, **kwargs, run_dir=str(tmp_path / "run"))
    run = made.prepare(classifier(), unscaled())
    with pytest.raises(FlsuiteError, match=message):
        FlowerStrategy(run)
