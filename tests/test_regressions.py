"""Faults that were there once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite.aggregators import Centralized, CohortRule
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.federation.server.arrivals import RoundLog
from flsuite.models import MLP, Classifier
from flsuite.runs.summary import RunSummary
from tests.conftest import classifier, digits, equal_states, trainer


def test_pooled_training_scores_what_it_trained_even_of_a_model_with_private_parts() -> None:
    def fit(private: tuple[str, ...]) -> float:
        made = trainer(rounds=3, aggregator=Centralized())
        model = Classifier(MLP(hidden=(16,)), lambda p: torch.optim.SGD(p, lr=0.1), private=private)
        made.fit(model, digits())
        return made.test()[0]["accuracy"]

    assert fit(("network.1",)) == fit(())


def test_the_trainers_seed_splits_data_that_was_set_up_before() -> None:
    module, fresh = digits(), digits()
    module.setup()
    made, other = trainer(rounds=1, seed=5), trainer(rounds=1, seed=5)
    made.fit(classifier(), module)
    other.fit(classifier(), fresh)
    assert equal_states(made.federation.state, other.federation.state)


def test_scores_of_another_federation_are_not_given_for_this_one() -> None:
    made = trainer(rounds=1)
    made.fit(classifier(), digits())
    with pytest.raises(FlsuiteError, match="another federation"):
        made.test(classifier(), digits())


def test_evaluation_leaves_frozen_parts_frozen() -> None:
    class Frozen(Classifier):
        def build(self, spec: Any) -> None:
            super().build(spec)
            self.network[0].eval()

    made, model = trainer(rounds=2), Frozen(MLP(hidden=(8,)))
    made.fit(model, digits())
    assert not model.network[0].training and model.network[1].training


def test_an_undefined_score_picks_nothing() -> None:
    summary = RunSummary("auroc")
    scores = ({"accuracy": 0.5}, {"auroc": float("nan")}, {"auroc": 0.6}, {"auroc": 0.5})
    assert [summary.is_best(row) for row in scores] == [False, False, True, False]


def test_a_metric_of_some_clients_is_their_mean() -> None:
    log = RoundLog()
    for client, metrics in enumerate([{"kl": 2.0}, {"kl": 4.0}, {}]):
        log.updates.append(ClientUpdate(client, 1, 10, 1, torch.zeros(2), {}, metrics=metrics))
    assert dict(log.metrics())["global"]["kl"] == 3.0


def test_an_aggregator_may_stop_listening() -> None:
    class First(CohortRule):
        def combine(self, server: Any, updates: Any) -> Any:
            return next(updates).state

    made = trainer(rounds=2, aggregator=First())
    made.fit(classifier(), digits())
    assert len(made.federation.log.updates) == 5


def test_an_optimizer_that_needs_a_closure_trains_everybody() -> None:
    made = trainer(rounds=2)
    optimizer = partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
    made.fit(Classifier(MLP(hidden=(8,)), optimizer), digits())
    assert not made.federation.log.failures


def test_a_folder_taken_meanwhile_is_not_shared(tmp_path: Path) -> None:
    made = trainer(rounds=1, run_dir=tmp_path)
    made.fit(classifier(), digits())
    with pytest.raises(FileExistsError):
        made.run.folder.table.create()


def test_data_may_move_between_a_kill_and_a_resume(tmp_path: Path) -> None:
    trainer(rounds=1, run_dir=tmp_path / "run").fit(classifier(), digits(root=str(tmp_path / "a")))
    made = trainer(rounds=2, run_dir=tmp_path / "run")
    made.fit(classifier(), digits(root=str(tmp_path / "b")), ckpt_path="last")
    assert made.round == 2
