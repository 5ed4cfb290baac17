"""FedALA with weights of one is FedAvg, and learns them until its losses agree."""

from collections.abc import Iterator
from itertools import chain, cycle, repeat

import pytest
import torch

from flsuite.aggregators import FedALA, FedAvg
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
