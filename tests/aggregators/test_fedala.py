"""FedALA with weights of one is FedAvg, and learns them until its losses agree."""

from collections.abc import Iterator
from itertools import chain, cycle, repeat

import pytest
import torch

from flsuite.aggregators import FedALA, FedAvg
from flsuite.aggregators.fedala import mixed
from flsuite.common.client import Evaluation
from flsuite.federation.client.fit import OneFit
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_equal,
    federation,
    reference,
    run,
)


def test_with_all_weights_at_one_it_is_fedavg() -> None:
    assert_equal(run(FedALA(rate=0.0)).federation.state, reference(FedAvg).federation.state)


def test_only_the_upper_layers_are_mixed_and_a_client_is_scored_by_its_own_model() -> None:
    made = run(FedALA(layers=1))
    held, state = made.federation.clients[1]["objective"], made.federation.client_state(1)
    assert set(held["weights"]) == {"network.3.weight", "network.3.bias"}
    assert_equal({k: state[k] for k in held["local"]}, held["local"])
    assert all(torch.isfinite(v).all() for v in made.federation.state.values())


@pytest.mark.parametrize(
    ("losses", "passes"),
    [
        (repeat(1.0), 11),
        (chain(repeat(1.0, 5), repeat(0.0)), 15),
        (cycle([0.0, 1.0]), 100),
        (repeat(float("nan")), 100),
    ],
    ids=["level", "level from pass 6", "up and down", "not a number"],
)
def test_weights_are_learned_until_ten_losses_agree_and_then_in_one_pass(
    losses: Iterator[float], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def evaluate(fit: OneFit, *args: object) -> Evaluation:
        seen.append(next(losses))
        return Evaluation(torch.tensor(seen[-1]), {}, {})

    monkeypatch.setattr(OneFit, "evaluate", evaluate)
    federation(FedALA(), 3).fit(Quadratic(), Quadratics((1.0,), (1.0,)))
    assert len(seen) == passes + 1


def test_weights_of_one_take_the_global_model_and_weights_of_zero_the_own_one() -> None:
    v, w = {"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([3.0, 5.0])}
    assert torch.equal(mixed(v, w, {"a": torch.tensor([1.0, 0.0])})["a"], torch.tensor([3.0, 2.0]))
