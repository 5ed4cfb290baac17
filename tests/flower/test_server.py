"""Under Flower, a federation ends with the same weights and scores as on flsuite's engine."""

from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'flsuite[flower]'")

from flwr.app import Context, Message

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
from flsuite.flower.app import make_client_app
from flsuite.flower.client import Site
from flsuite.flower.nodes import own_client
from flsuite.flower.server import serve
from tests.aggregators.test_baseline_methods import EVERY
from tests.conftest import classifier, equal_states, mostly_long, state, table, trainer
from tests.flower.grid import (
    Nodes,
    autoencoder,
    both,
    convolution,
    fused,
    many,
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


def test_a_last_round_that_was_not_due_is_scored_on_the_nodes() -> None:
    class Stops(FederationCallback):
        def on_round_end(self, run: Any, round: int) -> None:
            run.stop()

    ours, theirs, _ = both(personal, FedAvg, rounds=5, evaluate_every=2, callbacks=[Stops()])
    assert ours.round == theirs.round == 1
    assert table(ours) == pytest.approx(table(theirs), abs=1e-9, nan_ok=True)
    assert any(key[3] == "accuracy" for key in table(theirs))


def test_a_node_without_an_answer_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Site):
        def evaluate(self, message: Message, context: Context) -> Message:
            if own_client(context) == 1:
                raise FlsuiteError("the disk is full")
            return super().evaluate(message, context)

    site, made = Silent(trainer(), personal(), unscaled()), trainer(rounds=1)
    serve(Nodes(5, make_client_app(lambda context: site)), made, personal(), unscaled())
    scored = {key[1] for key in table(made) if key[2:] == ("test", "accuracy")}
    assert scored == {"global", "0", "2", "3", "4"}
    assert caplog.text.count("round 1: client 1 was not scored: the disk is full") == 1


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
    with pytest.raises(FlsuiteError, match=message):
        serve(Nodes(5), made, classifier(), unscaled())
    assert not (tmp_path / "run").exists()
