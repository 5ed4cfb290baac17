"""FedAvgM, FedAdagrad, FedAdam and FedYogi against their update rules, worked by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from federations import (
    configured,
    run,
    update,
)

from flsuite.aggregators import (
    Aggregator,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
)


def server_steps(
    aggregator: Aggregator, start: float, clients: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the global number after each round, given what two clients send in it."""
    configured(aggregator, "w")
    state = {"w": torch.tensor([start])}
    found = []
    for sent in clients:
        state = aggregator.aggregate(
            state, iter([update(i, {"w": torch.tensor([w])}) for i, w in enumerate(sent)])
        )
        found.append(float(state["w"]))
    return found


def test_fedavgm_without_momentum_is_fedavg() -> None:
    plain, server = run(FedAvg()), run(FedAvgM(lr=1.0, momentum=0.0))
    for name, value in plain.federation.state.items():
        torch.testing.assert_close(server.federation.state[name], value)


def test_fedavgm_by_hand() -> None:
    """Deltas 2 and 1: v = 2, then 0.5 * 2 + 1 = 2; the state moves by 0.1 v."""
    assert server_steps(
        FedAvgM(lr=0.1, momentum=0.5), 1.0, [(2.0, 4.0), (2.4, 2.0)]
    ) == pytest.approx([1.2, 1.4])


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
