"""Per-FedAvg without an inner step is FedAvg on its second batches, and its gradient is exact."""

from typing import Any, Literal

import pytest
import torch
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import FedAvg, PerFedAvg
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_equal,
    federation,
    run,
    table_model,
)


def test_without_an_inner_step_it_is_fedavg_on_the_second_batches() -> None:
    class SecondBatches(type(table_model())):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.number = getattr(self, "number", 0) + 1
            if self.number % 2:
                for parameter in self.parameters():
                    parameter.grad = None

    plain = table_model()
    model = SecondBatches(plain.backbone, plain.optimizer)
    made = run(PerFedAvg(alpha=0.0), 2, max_epochs=2)
    assert_equal(
        made.federation.state, run(FedAvg(), 2, max_epochs=2, model=model).federation.state
    )


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_the_gradient_on_a_quadratic_is_exact(order: Literal["first", "hessian_free"]) -> None:
    """At ``w``: ``a (w~ - m)`` with ``w~ = w - alpha a (w - m)``, times ``1 - alpha a``."""
    a, m, alpha, rate = 3.0, 2.0, 0.1, 0.05
    made = federation(PerFedAvg(alpha, order, delta=1e-2), 1, max_epochs=2)
    made.fit(Quadratic(lambda p: SGD(p, lr=rate)), Quadratics((a,), (m,)))
    gradient = a * (alpha * a * m - m) * ((1 - alpha * a) if order == "hessian_free" else 1)
    assert float(made.federation.state["w"]) == pytest.approx(-rate * gradient, rel=1e-4)
    assert torch.isfinite(made.federation.state["w"])


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_a_single_batch_serves_as_both(order: Literal["first", "hessian_free"]) -> None:
    a, m, alpha, rate = 3.0, 2.0, 0.1, 0.05
    made = federation(PerFedAvg(alpha, order, delta=1e-2), 1, max_epochs=1)
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
