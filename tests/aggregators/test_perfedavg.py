"""The gradient of Per-FedAvg is exact, and what it does not go with is refused."""

from typing import Any

import pytest
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import PerFedAvg
from tests.aggregators.federations import Quadratic, Quadratics, federation, run, table_model


@pytest.mark.parametrize("order", ["first", "hessian_free"])
@pytest.mark.parametrize("batches", [1, 2])
def test_the_gradient_on_a_quadratic_is_exact(batches: int, order: Any) -> None:
    """At ``w``: ``a (w~ - m)`` with ``w~ = w - alpha a (w - m)``, times ``1 - alpha a``.

    A single batch serves as both.
    """
    a, m, alpha, rate = 3.0, 2.0, 0.1, 0.05
    made = federation(PerFedAvg(alpha, order, delta=1e-2), 1, max_epochs=batches)
    made.fit(Quadratic(lambda p: SGD(p, lr=rate)), Quadratics((a,), (m,)))
    gradient = a * (alpha * a * m - m) * ((1 - alpha * a) if order == "hessian_free" else 1)
    assert float(made.federation.state["w"]) == pytest.approx(-rate * gradient, rel=1e-4)


def test_batches_that_make_one_step_together_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="leave out accumulate_grad_batches"):
        run(PerFedAvg(), 1, accumulate_grad_batches=2)


def test_a_model_that_steps_itself_is_refused() -> None:
    model = table_model()
    model.automatic_optimization = False
    with pytest.raises(FlsuiteError, match="change the model"):
        run(PerFedAvg(), 1, model=model)


def test_the_difference_of_gradients_is_not_rounded_to_half_precision() -> None:
    full, mixed = (
        run(PerFedAvg(1.0, "hessian_free"), 1, precision=precision, max_epochs=2).federation.state
        for precision in ("32-true", "bf16-mixed")
    )
    assert (full["network.0.weight"] - mixed["network.0.weight"]).abs().max() < 0.02
