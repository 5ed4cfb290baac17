"""The gradient of Per-FedAvg is exact. test_second_model has what it does not go with."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from flsuite.aggregators import FedAvg, Objective, PerFedAvg
from flsuite.aggregators.perfedavg import MetaGradient
from flsuite.common.client import ClientContext
from flsuite.common.state import State
from flsuite.federation import InProcess, Vectorized
from tests.aggregators.federations import Quadratic, Quadratics, optimum, run


class Skipping(Quadratic):
    """Skips the batch of the second epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 1 else None


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_batch_that_the_model_skips_leaves_the_weights(epochs: int) -> None:
    """The batches of the first and third epoch are then a pair."""
    data, skips = Quadratics((3.0,), (2.0,)), Skipping(partial(SGD, lr=0.05))
    reached = optimum(PerFedAvg(0.1), data, 1, epochs, model=skips)
    pair = optimum(PerFedAvg(0.1), data, 1, 2, model=Quadratic(partial(SGD, lr=0.05)))
    assert reached == (pair if epochs == 3 else 0.0)


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


class Leads(Objective):
    """Takes the gradient of the second batch at a second model that the first one moves."""

    batches_per_step = 2

    def start(self, client: ClientContext, w: Any) -> Any:
        return w, w

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        v = oracle.step("v", held, oracle(w, batch[0]))
        return oracle(v, batch[1]), v


@pytest.mark.parametrize("engine", [InProcess(), Vectorized(clients=2)])
def test_a_second_model_steps_once_per_pair(engine: Any) -> None:
    """Its momentum shows how often, also where the second batch is needed at its weights first."""
    a, m, rate = 3.0, 2.0, 0.05
    w, v, of_w, of_v = 0.0, 0.0, 0.0, 0.0
    for _ in range(3):
        of_v = 0.9 * of_v + a * (w - m)
        v -= rate * of_v
        of_w = 0.9 * of_w + a * (v - m)
        w -= rate * of_w
    model = Quadratic(partial(SGD, lr=rate, momentum=0.9))
    own = FedAvg(objective=Leads()), Quadratics((a, a), (m, m)), 1, 6
    assert optimum(*own, model=model, engine=engine) == pytest.approx(w, rel=1e-5)


class Counting(Quadratic):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Counting.steps += 1
        return self.w.square()


@pytest.mark.parametrize("engine", [InProcess(), Vectorized(clients=2)])
def test_a_pair_of_batches_costs_two_gradients(engine: Any) -> None:
    taken = []
    for aggregator in (FedAvg(), PerFedAvg(0.1)):
        Counting.steps = 0
        optimum(
            aggregator, Quadratics((1.0, 2.0), (0.0, 1.0)), 2, 4, model=Counting(), engine=engine
        )
        taken.append(Counting.steps)
    assert taken[0] == taken[1] > 0


class Drawing(Quadratic):
    """Draws random numbers, like a model with dropout."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.0 * torch.rand(())


def test_what_it_draws_is_drawn_once() -> None:
    """On ``a / 2 w^2``, ``g = a (w + x) (1 - alpha a)``, whose ``x`` shows in both factors."""
    a, alpha = 2.0, 0.1
    seen: list[float] = []

    class Seeing(MetaGradient):
        """Looks ahead at weights that it draws."""

        def gradient(self, oracle: Any, w: State, held: Any, batch: Any) -> tuple[State, Any]:
            asked: list[float] = []

            class Watched:
                rate = oracle.rate

                def __call__(self, at: State, *args: Any, **kwargs: Any) -> State:
                    asked.append(float(at["w"]))
                    return oracle(at, *args, **kwargs)

            w = {name: value + torch.randn_like(value) for name, value in w.items()}
            g, held = super().gradient(Watched(), w, held, batch)
            seen.append(asked[1])  # w~
            assert float(g["w"]) == pytest.approx(a * asked[1])
            assert asked[1] == pytest.approx(asked[0] * (1 - alpha * a))
            return g, held

    aggregator = FedAvg(objective=Seeing(alpha))
    optimum(aggregator, Quadratics((a,), (0.0,)), 1, 4, model=Drawing())
    assert len(seen) == 2


def test_the_difference_of_gradients_is_not_rounded_to_half_precision() -> None:
    full, mixed = (
        run(PerFedAvg(1.0, "hessian_free"), 1, precision=precision, max_epochs=2).federation.state
        for precision in ("32-true", "bf16-mixed")
    )
    assert (full["network.0.weight"] - mixed["network.0.weight"]).abs().max() < 0.02
