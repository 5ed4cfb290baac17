"""Rounds are compared on the same clients. The last round also scores all clients."""

from typing import Any

import pytest
import torch

from flsuite.data import IID
from tests.conftest import classifier, digits, trainer

FEW, ALL, ROUNDS = 2, 6, 3


def fit(private: tuple[str, ...]) -> Any:
    torch.set_num_threads(1)
    made = trainer(rounds=ROUNDS, score_clients=FEW)
    made.fit(classifier(private=private), digits(clients=ALL, partition=IID()))
    return made


@pytest.fixture(scope="module")
def personal() -> Any:
    return fit(("network.3",))


def numbers(made: Any, scope: str, split: str, metric: str) -> dict[int, float]:
    rows = made.run.folder.table.rows
    return {row[0]: row[8] for row in rows if row[5:8] == (scope, split, metric)}


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_score_of_every_round_is_of_the_same_clients(split: str, personal: Any) -> None:
    score = numbers(personal, "global", split, "accuracy")
    own = [numbers(personal, str(c), split, "accuracy_all") for c in range(ALL)]
    assert sorted(score) == [1, 2, 3]
    for round, value in score.items():
        assert value == pytest.approx(sum(own[c][round] for c in range(FEW)) / FEW)
    assert [len(column) for column in own] == [3, 3, 1, 1, 1, 1], "others in the last round only"
    everybody = numbers(personal, "global", split, "all_clients/accuracy")
    assert list(everybody) == [ROUNDS]
    assert everybody[ROUNDS] == pytest.approx(sum(column[ROUNDS] for column in own) / ALL)


def test_clients_of_a_shared_model_are_compared_likewise() -> None:
    made = fit(())
    mean = numbers(made, "global", "test", "accuracy_client_mean")
    own = [numbers(made, str(c), "test", "accuracy") for c in range(ALL)]
    for round, value in mean.items():
        assert value == pytest.approx(sum(own[c][round] for c in range(FEW)) / FEW)
    everybody = numbers(made, "global", "test", "all_clients/accuracy_client_mean")
    assert everybody == {ROUNDS: pytest.approx(sum(column[ROUNDS] for column in own) / ALL)}
    whole = numbers(made, "global", "test", "all_clients/accuracy")
    assert whole == {ROUNDS: numbers(made, "global", "test", "accuracy")[ROUNDS]}


def test_where_all_clients_are_compared_nothing_is_scored_twice() -> None:
    made = trainer(rounds=1, score_clients=ALL)
    made.fit(classifier(), digits(clients=ALL, partition=IID()))
    assert not [row for row in made.run.folder.table.rows if row[7].startswith("all_clients/")]
