"""The gradient of Per-FedAvg is exact. test_second_model has what it does not go with."""

from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from flsuite.aggregators import PerFedAvg
from tests.aggregators.federations import Quadratic, Quadratics, optimum, run


@pytest.mark.parametrize("order", ["first", "hessian_free"])
@pytest.mark.parametrize("batches", [1, 2])
def test_the_gradient_on_a_quadratic_is_exact(batches: int, order: Any) -> None:
    """At ``w``: ``a (w~ - m)`` with ``w~ = w - alpha a (w - m)``, times ``1 - alpha a``.

    A single batch serves as both.
    """
    a, m, alpha, rate = 3.0, 2.0, 0.1, 0.05
    aggregator, model = PerFedAvg(alpha, order, delta=1e-2), Quadratic(partial(SGD, lr=rate))
    gradient = a * (alpha * a * m - m) * ((1 - alpha * a) if order == "hessian_free" else 1)
    reached = optimum(aggregator, Quadratics((a,), (m,)), 1, batches, model=model)
    assert reached == pytest.approx(-rate * gradient, rel=1e-4)


def test_the_difference_of_gradients_is_not_rounded_to_half_precision() -> None:
    full, mixed = (
        run(PerFedAvg(1.0, "hessian_free"), 1, precision=precision, max_epochs=2).federation.state
        for precision in ("32-true", "bf16-mixed")
    )
    assert (full["network.0.weight"] - mixed["network.0.weight"]).abs().max() < 0.02
