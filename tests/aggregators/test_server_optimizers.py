"""FedAvgM, FedAdagrad, FedAdam and FedYogi against their update rules, worked by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from flsuite.aggregators import Aggregator, FedAdagrad, FedAdam, FedAvgM, FedYogi
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State
from tests.aggregators.federations import configured, update
from tests.aggregators.stale_updates import late, numbers


def server_steps(
    aggregator: Aggregator, start: float, clients: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the global number after each round, given what two clients send in it."""
    server = configured(aggregator, "w")
    state = {"w": torch.tensor([start])}
    found = []
    for sent in clients:
        state = server.aggregate(
            state, iter([update(i, {"w": torch.tensor([w])}) for i, w in enumerate(sent)])
        )
        found.append(float(state["w"]))
    return found


def test_momentum_goes_on_in_a_round_without_updates() -> None:
    """For example an empty Poisson cohort: v = 2, then 0.5 * 2; buffers stay."""
    server = configured(FedAvgM(momentum=0.5), "w")
    state = server.aggregate(numbers(w=0.0, mean=1.0), [update(0, numbers(w=2.0, mean=5.0))])
    assert (state["w"].item(), state["mean"].item()) == (2.0, 5.0)
    state = server.aggregate(state, [])
    assert (state["w"].item(), state["mean"].item()) == (3.0, 5.0)


@pytest.mark.parametrize("method", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_server_optimizers_by_hand(method: type) -> None:
    """Against lines 11 to 15 of algorithm 2 on one number."""
    lr, beta1, beta2, tau = 0.3, 0.6, 0.8, 0.01
    sent = [(1.0, 2.0), (-1.0, 0.5), (0.7, 0.6)]
    x, m, v, expected = 0.2, 0.0, tau**2, []
    for pair in sent:
        delta = np.mean(pair) - x
        m = beta1 * m + (1 - beta1) * delta
        if method is FedAdagrad:
            v = v + delta**2
        elif method is FedYogi:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        x = x + lr * m / (np.sqrt(v) + tau)
        expected.append(x)
    second = {} if method is FedAdagrad else {"beta2": beta2}
    assert server_steps(method(lr=lr, beta1=beta1, tau=tau, **second), 0.2, sent) == pytest.approx(
        expected, rel=1e-5
    )


def late_round() -> tuple[State, list[ClientUpdate]]:
    """Return a round with delta ``(1 * 2 + 3 * 0.5 * 4) / (1 + 3) = 2`` for every entry.

    The second update is of staleness 3, which has the weight 0.5.
    """
    old = {**numbers(w=10.0, mean=-1.0), "count": torch.tensor(9)}
    fresh = {**numbers(w=12.0, mean=1.0), "count": torch.tensor(4)}
    base = {**numbers(w=1.0, mean=20.0), "count": torch.tensor(1)}
    trained = {**numbers(w=5.0, mean=24.0), "count": torch.tensor(6)}
    return old, [late(0, fresh, 1, 0, old), late(1, trained, 3, 3, base)]


def test_fedavgm_with_late_updates_by_hand() -> None:
    """v = 2, then 0.5 * 2 + 2 = 3; the state moves by 0.1 v, and buffers by the change itself."""
    old, updates = late_round()
    optimizer = configured(FedAvgM(lr=0.1, momentum=0.5), "w")
    new = optimizer.aggregate(old, iter(updates))
    assert new["w"].item() == pytest.approx(10.2, rel=1e-12)
    assert (new["mean"].item(), new["count"].item()) == (1.0, 9)

    # The changes are taken from the bases, wherever the global model is now.
    fresh = late(0, numbers(w=12.2, mean=3.0) | {"count": torch.tensor(1)}, 1, 0, new)
    assert optimizer.aggregate(new, iter([fresh, updates[1]]))["w"].item() == pytest.approx(10.5)


@pytest.mark.parametrize("method", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_optimizers_with_late_updates_by_hand(method: type) -> None:
    """Lines 11 to 15 of algorithm 2 with delta = 2."""
    old, updates = late_round()
    new = configured(method(lr=0.3, beta1=0.6, tau=0.01), "w").aggregate(old, iter(updates))

    first, start = 0.4 * 2.0, 0.01**2
    second = {
        FedAdagrad: start + 4.0,
        FedAdam: 0.99 * start + 0.01 * 4.0,
        FedYogi: start + 0.01 * 4.0,
    }[method]
    expected = 10.0 + 0.3 * first / (np.sqrt(second) + 0.01)
    assert new["w"].item() == pytest.approx(expected, rel=1e-12)
    assert (new["mean"].item(), new["count"].item()) == (1.0, 9)


def test_staleness_damps_an_update_that_is_alone() -> None:
    """Normalized by the buffer's size, as in FedBuff. Otherwise a lone update is never damped."""
    moved = []
    for staleness in ("polynomial", "constant"):
        optimizer = configured(FedAvgM(momentum=0.0, staleness=staleness), "w")
        sent = late(0, numbers(w=5.0), 7, 3, numbers(w=1.0))
        moved.append(optimizer.aggregate(numbers(w=10.0), iter([sent]))["w"].item())
    assert moved == pytest.approx([12.0, 14.0], rel=1e-12)
