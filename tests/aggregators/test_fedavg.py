"""FedAvg against the fixed point of two quadratic clients, and its mean worked by hand."""

import copy

import numpy as np
import pytest
import torch

from flsuite.aggregators import FedAvg
from tests.aggregators.federations import (
    CURVATURES,
    MINIMA,
    Quadratics,
    assert_equal,
    configured,
    optimum,
    update,
)


def test_fedavg_on_two_quadratics_stops_where_the_drift_balances() -> None:
    """Client i maps w to ``m_i + r_i (w - m_i)`` with ``r_i = (1 - lr a_i)^K``."""
    reached = optimum(FedAvg(weighting="uniform"), Quadratics(CURVATURES, MINIMA), rounds=14)
    left = (1 - 0.05 * np.array(CURVATURES)) ** 10
    assert reached == pytest.approx(0.713442, abs=1e-4)
    assert reached == pytest.approx(((1 - left) @ MINIMA) / (1 - left).sum(), abs=1e-4)


def test_fedavg_weighs_by_samples_or_uniformly_and_counters_take_the_maximum() -> None:
    states = [
        {"w": torch.tensor(w), "mean": torch.tensor([mean]), "count": torch.tensor(count)}
        for w, mean, count in (([1.0, 2.0], 4.0, 7), ([5.0, 0.0], 0.0, 3))
    ]
    before = copy.deepcopy(states)
    for weighting, w, mean in [("samples", [2.0, 1.5], 3.0), ("uniform", [3.0, 1.0], 2.0)]:
        aggregator = configured(FedAvg(weighting), "w")
        sent = [update(client, states[client], (30, 10)[client]) for client in range(2)]
        new = aggregator.aggregate(states[1], iter(sent))
        assert (new["w"].tolist(), new["mean"].tolist()) == (w, [mean])
        assert torch.equal(new["count"], torch.tensor(7))
    for state, old in zip(states, before, strict=True):
        assert_equal(state, old)
