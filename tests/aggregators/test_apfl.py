"""APFL's models and its own share on a quadratic, step by step."""

import pytest
from torch.optim import SGD

from flsuite.aggregators import APFL
from tests.aggregators.federations import Quadratic, Quadratics, federation


def test_all_steps_of_one_client_by_hand() -> None:
    a, m, rate, steps = 2.0, 1.5, 0.1, 6
    made = federation(APFL(0.3), 2, max_epochs=steps)
    made.fit(Quadratic(lambda params: SGD(params, lr=rate)), Quadratics((a,), (m,)))

    w, v, alpha = 0.0, 0.0, 0.3
    for _ in range(2 * steps):
        gradient = a * (alpha * v + (1 - alpha) * w - m)
        slope = (v - w) * gradient
        v, alpha = v - rate * alpha * gradient, min(max(alpha - rate * slope, 0.0), 1.0)
        w -= rate * a * (w - m)
    assert alpha != 0.3
    memory = made.federation.clients[0]["objective"]
    assert memory["alpha"] == pytest.approx(alpha, rel=1e-4)
    assert float(memory["local"]["w"]) == pytest.approx(v, rel=1e-4)
    own = made.federation.client_state(0)["w"]
    assert float(own) == pytest.approx(alpha * v + (1 - alpha) * w, rel=1e-4)
