"""Ditto against local training, the global model, and its closed form on quadratics."""

import pytest
from torch.optim import SGD

from flsuite.aggregators import Ditto, FedAvg, LocalOnly
from flsuite.callbacks import GradientDissimilarity
from flsuite.state import State
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    assert_equal,
    federation,
    reference,
    run,
)
from tests.conftest import table


def own(made: object, client: int) -> State:
    return made.federation.client_state(client)  # type: ignore[attr-defined]


def test_without_a_pull_it_is_fedavg_and_local_training() -> None:
    ditto, alone = run(Ditto(0.0)), reference(LocalOnly)
    assert_equal(ditto.federation.state, reference(FedAvg).federation.state)
    parameters = set(ditto.federation.server.layout.parameters)
    for client in range(4):
        mine, local = own(ditto, client), own(alone, client)
        assert_equal(*({k: s[k] for k in parameters} for s in (mine, local)))


@pytest.mark.parametrize(("lam", "rounds"), [(0.5, 8), (40.0, 12)])
def test_on_quadratics_it_ends_at_its_closed_form(lam: float, rounds: int) -> None:
    """``argmin a / 2 (v - m)^2 + lam / 2 (v - w)^2`` is ``(a m + lam w) / (a + lam)``."""
    curvatures, minima = (1.0, 3.0), (0.0, 1.0)
    made = federation(Ditto(lam, weighting="uniform"), rounds, max_epochs=10)
    model = Quadratic(lambda params: SGD(params, lr=min(0.1, 0.9 / lam)))
    made.fit(model, Quadratics(curvatures, minima))
    w = float(made.federation.state["w"])
    for client, (a, m) in enumerate(zip(curvatures, minima, strict=True)):
        reached = float(own(made, client)["w"])
        assert reached == pytest.approx((a * m + lam * w) / (a + lam), abs=5e-3)
        assert lam < 40 or reached == pytest.approx(w, abs=0.03), "nearly the global model"


def test_gradient_dissimilarity_is_measured_at_the_global_model() -> None:
    gammas = []
    for aggregator in (Ditto(0.1), FedAvg()):
        made = run(aggregator, 2, callbacks=[GradientDissimilarity()])
        (value,) = (v for k, v in table(made).items() if k[0] == 2 and k[3] == "gamma")
        gammas.append(value)
    assert gammas[0] == gammas[1]
