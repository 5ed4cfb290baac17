"""q-FedAvg: FedAvg with q 0, and its formula on two clients."""

import pytest
import torch
from torch.optim import SGD

from flsuite.aggregators import FedAvg, QFedAvg
from tests.aggregators.federations import Quadratic, Quadratics, federation, optimum, run


def test_with_q_zero_it_is_fedavg_with_uniform_weights() -> None:
    made, average = run(QFedAvg(0.0), 3), run(FedAvg("uniform"), 3)
    for name, value in average.federation.state.items():
        torch.testing.assert_close(made.federation.state[name], value)


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0])
def test_the_step_of_two_quadratic_clients(q: float) -> None:
    curvatures, minima, rate = (1.0, 2.0), (1.0, 3.0), 0.1
    made = federation(QFedAvg(q), 1)
    made.fit(Quadratic(lambda p: SGD(p, lr=rate)), Quadratics(curvatures, minima))
    above, below = 0.0, 0.0
    for a, m in zip(curvatures, minima, strict=True):
        loss, change = a / 2 * m**2, -rate * a * m  # w - w_k
        d = change / rate
        above += loss**q * d
        below += q * loss ** (q - 1) * d**2 + loss**q / rate
    assert float(made.federation.state["w"]) == pytest.approx(-above / below, rel=1e-5)


def test_losses_of_zero_leave_the_model() -> None:
    assert optimum(QFedAvg(40.0), Quadratics((1.0, 1.0), (0.0, 0.0)), 2) == 0.0
