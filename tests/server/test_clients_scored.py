"""Rounds are compared on the same clients. The last round also scores all clients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flsuite.data import IID
from flsuite.models import MLP, Classifier
from tests.conftest import digits, trainer

FEW, ALL, ROUNDS = 2, 6, 3


def fit(private: tuple[str, ...], folder: Path, **kwargs: Any) -> Any:
    made = trainer(rounds=ROUNDS, score_clients=FEW, run_dir=folder, **kwargs)
    model = Classifier(MLP(hidden=(16,)), lambda p: torch.optim.SGD(p, lr=0.1), private=private)
    made.fit(model, digits(clients=ALL, partition=IID()))
    return made


def numbers(made: Any, scope: str, split: str, metric: str) -> dict[int, float]:
    rows = made.run.folder.table.rows
    return {row[0]: row[8] for row in rows if row[5:8] == (scope, split, metric)}


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_score_of_every_round_is_of_the_same_clients(split: str, tmp_path: Path) -> None:
    made = fit(("network.3",), tmp_path)
    score = numbers(made, "global", split, "accuracy")
    own = [numbers(made, str(c), split, "accuracy_all") for c in range(ALL)]
    assert sorted(score) == [1, 2, 3]
    for round, value in score.items():
        assert value == pytest.approx(sum(own[c][round] for c in range(FEW)) / FEW)
    assert [len(column) for column in own] == [3, 3, 1, 1, 1, 1], "others in the last round only"
    everybody = numbers(made, "global", split, "all_clients/accuracy")
    assert list(everybody) == [ROUNDS]
    assert everybody[ROUNDS] == pytest.approx(sum(column[ROUNDS] for column in own) / ALL)


def test_the_picked_round_is_the_best_of_the_compared_scores(tmp_path: Path) -> None:
    made = fit(("network.3",), tmp_path)
    validation = numbers(made, "global", "val", "accuracy_client_mean")
    picked = max(validation, key=lambda n: (validation[n], -n))
    assert made.run.summary.best["round"] == picked
    test = numbers(made, "global", "test", "accuracy")
    assert made.run.summary.best["accuracy"] == test[picked]


def test_clients_of_a_shared_model_are_compared_likewise(tmp_path: Path) -> None:
    made = fit((), tmp_path)
    mean = numbers(made, "global", "test", "accuracy_client_mean")
    own = [numbers(made, str(c), "test", "accuracy") for c in range(ALL)]
    for round, value in mean.items():
        assert value == pytest.approx(sum(own[c][round] for c in range(FEW)) / FEW)
    everybody = numbers(made, "global", "test", "all_clients/accuracy_client_mean")
    assert everybody == {ROUNDS: pytest.approx(sum(column[ROUNDS] for column in own) / ALL)}
    whole = numbers(made, "global", "test", "all_clients/accuracy")
    assert whole == {ROUNDS: numbers(made, "global", "test", "accuracy")[ROUNDS]}


def test_where_all_clients_are_compared_nothing_is_scored_twice(tmp_path: Path) -> None:
    made = trainer(rounds=1, score_clients=ALL, run_dir=tmp_path)
    made.fit(Classifier(MLP(hidden=(8,))), digits(clients=ALL, partition=IID()))
    assert not [row for row in made.run.folder.table.rows if row[7].startswith("all_clients/")]
