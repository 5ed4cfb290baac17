"""The server step of pFedMe is a step. Its twin has the rest."""

import pytest

from flsuite.aggregators import PFedMe
from tests.aggregators.federations import Quadratic, Quadratics, federation


def test_beta_is_the_servers_step() -> None:
    def first(beta: float) -> float:
        made = federation(PFedMe(5.0, beta=beta), 1)
        made.fit(Quadratic(), Quadratics((1.0, 10.0), (1.0, 2.0)))
        return float(made.federation.state["w"])

    assert first(0.5) == pytest.approx(0.5 * first(1.0))
