"""pFedMe ends at the proximal point of quadratics, and its server step is a step."""

import pytest
from torch.optim import SGD

from flsuite.aggregators import PFedMe
from tests.aggregators.federations import Quadratic, Quadratics, federation


def test_personal_models_are_proximal_points_and_the_global_one_minimizes_the_envelopes() -> None:
    """The envelope of ``a / 2 (w - m)^2`` is a quadratic of curvature ``a lam / (a + lam)``."""
    curvatures, minima, lam = (1.0, 10.0), (0.0, 1.0), 5.0
    aggregator = PFedMe(lam, steps=12, personal_lr=0.1, weighting="uniform")
    made = federation(aggregator, 15, max_epochs=1)
    made.fit(Quadratic(lambda p: SGD(p, lr=0.3)), Quadratics(curvatures, minima))
    w = float(made.federation.state["w"])

    envelopes = [a * lam / (a + lam) for a in curvatures]
    best = sum(c * m for c, m in zip(envelopes, minima, strict=True)) / sum(envelopes)
    assert w == pytest.approx(best, abs=5e-3)
    for client, (a, m) in enumerate(zip(curvatures, minima, strict=True)):
        theta = float(made.federation.client_state(client)["w"])
        assert theta == pytest.approx((a * m + lam * w) / (a + lam), abs=5e-3)


def test_beta_is_the_servers_step() -> None:
    def first(beta: float) -> float:
        made = federation(PFedMe(5.0, beta=beta), 1)
        made.fit(Quadratic(), Quadratics((1.0, 10.0), (1.0, 2.0)))
        return float(made.federation.state["w"])

    assert first(0.5) == pytest.approx(0.5 * first(1.0))
