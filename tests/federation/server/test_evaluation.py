"""Scores of a federation: of one shared model, and of models with private parts."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsuite.aggregators import FedPer, LocalOnly
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import clone
from flsuite.data import DataSpec, DataSplit, FederatedDataModule, PublishedSplits
from flsuite.data.federated import Rows
from flsuite.federation.server.evaluation import GLOBAL, Evaluator
from flsuite.metrics import scores
from flsuite.models import Classifier
from flsuite.trainer import FederatedTrainer
from tests.conftest import classifier, digits, trainer

CPU = torch.device("cpu")


def evaluator(module: FederatedDataModule, batch_size: int = 1024) -> Evaluator:
    module.setup()
    model = classifier()
    torch.manual_seed(0)
    model.ensure_built(module.federated.spec)
    made = Evaluator(model, module.federated, CPU, nullcontext)
    made.batch_size = batch_size
    return made


def probabilities(model: Classifier, state: dict[str, Tensor], x: Tensor) -> Tensor:
    """Predict in the plain way: a network in evaluation mode, one batch."""
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return model(x).softmax(1)


@pytest.mark.parametrize("split", ["test", "val"])
def test_a_clients_scores_are_those_of_its_slice(split: Any) -> None:
    made = evaluator(digits(clients=6), batch_size=100)
    state = clone(made.model.state_dict())
    scored = made.shared(state, split, range(6))
    data = made.data
    arrays = data.test if split == "test" else data.val
    rows = arrays.rows
    assert scored.keys() == {GLOBAL, *(str(c) for c in range(6) if len(rows[c]))}
    for scope in scored.keys() - {GLOBAL}:
        own = arrays.take(rows[int(scope)])
        expected = scores(made.outputs(own), own.y, data.spec, auroc=False)
        assert scored[scope] == pytest.approx(expected | {"samples": len(own)})
        by_hand = probabilities(made.model, state, data.scaling(own.x)).argmax(1) == own.y
        assert scored[scope]["accuracy"] == pytest.approx(float(by_hand.double().mean()))
    clients = [row["accuracy"] for scope, row in scored.items() if scope != GLOBAL]
    assert scored[GLOBAL]["accuracy_client_mean"] == pytest.approx(np.mean(clients))
    assert scored[GLOBAL]["accuracy_client_worst"] == min(clients)
    assert scored[GLOBAL]["accuracy_client_std"] == pytest.approx(np.std(clients))
    samples = [row["samples"] for scope, row in scored.items() if scope != GLOBAL]
    assert scored[GLOBAL]["accuracy"] == pytest.approx(np.average(clients, weights=samples))


def test_evaluation_leaves_the_model_in_training_mode_and_ignores_batches() -> None:
    whole, parts = evaluator(digits()), evaluator(digits(), batch_size=7)
    state = clone(whole.model.state_dict())
    scored, again = whole.shared(state, "test", range(5)), parts.shared(state, "test", range(5))
    assert all(scored[scope] == pytest.approx(again[scope]) for scope in scored)
    assert parts.model.training


@pytest.fixture(scope="module")
def personal() -> FederatedTrainer:
    """Fit a federation whose clients keep their heads."""
    torch.set_num_threads(1)
    made = trainer(rounds=3, evaluate_every=3)
    made.fit(classifier(private=["network.3"]), digits(clients=6))
    return made


def test_every_client_is_scored_with_its_own_head(personal: FederatedTrainer) -> None:
    scored = {row[5:8]: row[8] for row in personal.run.folder.table.rows}
    federation = personal.federation
    assert federation is not None and "network.3.weight" not in federation.state
    data = federation.data
    heads = [federation.client_state(c)["network.3.weight"] for c in range(6)]
    assert all(not torch.equal(heads[0], head) for head in heads[1:])
    model = classifier()
    model.ensure_built(data.spec)
    whole, own = [], []
    for client in range(6):
        state = federation.client_state(client)
        right = probabilities(model, state, data.scaling(data.test.x)).argmax(1) == data.test.y
        whole.append(float(right.double().mean()))
        own.append(float(right[data.test.rows[client]].double().mean()))
        assert scored[str(client), "test", "accuracy_all"] == pytest.approx(whole[-1])
        assert scored[str(client), "test", "accuracy"] == pytest.approx(own[-1])
    assert scored[GLOBAL, "test", "accuracy"] == pytest.approx(np.mean(whole))
    assert scored[GLOBAL, "test", "accuracy_first_five"] == pytest.approx(np.mean(whole[:5]))
    assert scored[GLOBAL, "test", "accuracy_worst"] == pytest.approx(min(whole))
    assert scored[GLOBAL, "test", "accuracy_std"] == pytest.approx(np.std(whole))
    assert scored[GLOBAL, "test", "accuracy_client_mean"] == pytest.approx(np.mean(own))
    assert scored[GLOBAL, "test", "accuracy_client_worst"] == pytest.approx(min(own))
    assert np.mean(own) > np.mean(whole), "a head of its own knows the client's classes"


class WithPublishedValidation(FederatedDataModule):
    """Forty training, ten test and twelve validation samples of three classes."""

    def load(self) -> PublishedSplits:
        generator = torch.Generator().manual_seed(0)
        parts = [
            DataSplit(torch.randn(n, 4, generator=generator), torch.arange(n) % 3)
            for n in (40, 10, 12)
        ]
        return PublishedSplits(DataSpec((4,), 3), *parts)


def test_the_publishers_validation_split_belongs_to_nobody() -> None:
    made = evaluator(WithPublishedValidation(clients=4))
    scored = made.shared(clone(made.model.state_dict()), "val", range(4))
    assert scored.keys() == {GLOBAL} and not [name for name in scored[GLOBAL] if "client" in name]
    arrays = made.data.val
    assert arrays is not None and len(arrays) == 12
    own = made.own(2, clone(made.model.state_dict()), "val")
    assert own is not None and own.part == {}
    assert own.whole["accuracy"] == scored[GLOBAL]["accuracy"]


def test_without_validation_data_there_are_no_scores() -> None:
    made = evaluator(WithPublishedValidation(clients=4, val_fraction=0.0))
    assert made.data.val is None
    assert made.shared(clone(made.model.state_dict()), "val", range(4)) == {}


def picked(made: FederatedTrainer, statistic: str) -> int:
    """Return the round in which the validation score is the highest, the first on a tie."""
    rows = made.results
    best = rows[f"val/{statistic}"].dropna()
    return int(best.index[int(best.to_numpy().argmax())])


@pytest.mark.parametrize(
    ("settings", "statistic"),
    [
        ({"aggregator": LocalOnly()}, "accuracy_client_mean"),
        ({"aggregator": FedPer()}, "accuracy_client_mean"),
        ({"monitor": "accuracy_client_worst"}, "accuracy_client_worst"),
    ],
)
def test_models_of_ones_own_are_picked_by_the_clients_validation_samples(
    settings: dict[str, Any], statistic: str
) -> None:
    made = trainer(rounds=3, **settings)
    made.fit(classifier(), digits(clients=4, val_fraction=0.3))
    assert made.run.settings["monitor"] == statistic
    assert made.run.summary.best["round"] == picked(made, statistic)


def test_one_model_is_picked_by_its_accuracy() -> None:
    made = evaluator(digits(clients=4))
    assert made.monitored(None) == "accuracy"
    assert made.monitored(None, has_own_models=True) == "accuracy_client_mean"
    assert made.data.val is not None
    made.data.val.rows = Rows.of([])  # a published split, which belongs to no client
    assert made.monitored(None, has_own_models=True) == "accuracy"
    with pytest.raises(FlsuiteError, match="monitor must be one of accuracy"):
        made.monitored("accuracy_client_mean")
