"""Ditto's gradients are measured where FedAvg's are; its twin has the rest."""

from flsuite.aggregators import Ditto, FedAvg
from flsuite.callbacks import GradientDissimilarity
from tests.aggregators.federations import run
from tests.conftest import table


def test_gradient_dissimilarity_is_measured_at_the_global_model() -> None:
    gammas = []
    for aggregator in (Ditto(0.1), FedAvg()):
        made = run(aggregator, 2, callbacks=[GradientDissimilarity()])
        (value,) = (v for k, v in table(made).items() if k[0] == 2 and k[3] == "gamma")
        gammas.append(value)
    assert gammas[0] == gammas[1]
