"""FedProx against its closed form on two quadratic clients, and against FedAvg without its term."""

import numpy as np
import pytest
import torch

from flsuite.aggregators import FedAvg, FedProx, LocalOnly
from tests.aggregators.federations import (
    CURVATURES,
    MINIMA,
    Quadratics,
    assert_same_models,
    optimum,
    reference,
    run,
)


def test_fedprox_stops_at_its_closed_form() -> None:
    """K steps from w on ``a / 2 (y - m)^2 + mu / 2 (y - w)^2`` end at ``y* + q^K (w - y*)``.

    Here ``y* = (a m + mu w) / (a + mu)`` and ``q = 1 - lr (a + mu)``. The clients' mean of these
    affine maps has the fixed point below.
    """
    lr, mu, steps = 0.05, 4.0, 10
    a, m = np.array(CURVATURES), np.array(MINIMA)
    left = (1 - lr * (a + mu)) ** steps
    slope = (1 - left) * mu / (a + mu) + left
    offset = (1 - left) * a * m / (a + mu)
    fixed = offset.mean() / (1 - slope.mean())
    assert abs(fixed - 0.713442) > 0.05
    reached = optimum(
        FedProx(mu=mu, weighting="uniform"), Quadratics(CURVATURES, MINIMA), rounds=16
    )
    assert reached == pytest.approx(fixed, abs=1e-4)


def test_fedprox_without_its_term_is_fedavg() -> None:
    plain, pulled = reference(FedAvg), run(FedProx(mu=0.1))
    assert_same_models(plain, run(FedProx(mu=0.0)))
    name = "network.0.weight"
    assert not torch.equal(plain.federation.state[name], pulled.federation.state[name])


def test_fedprox_leaves_private_parameters_alone() -> None:
    """With every parameter private, the term changes nothing."""
    assert_same_models(reference(LocalOnly), run(FedProx(mu=1.0, private=["*"])))
