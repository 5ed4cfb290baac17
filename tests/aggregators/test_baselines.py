"""LocalOnly equals training alone, and Centralized uses the cohort's step budget."""

import pytest

from flsuite.aggregators import Centralized, FedAvg, LocalOnly
from flsuite.common.messages import POOLED
from flsuite.data import Digits, Dirichlet
from flsuite.federation import Synchronous
from flsuite.models import Classifier
from flsuite.models.backbones import MLP
from tests.aggregators.federations import (
    CURVATURES,
    MINIMA,
    Quadratic,
    Quadratics,
    assert_equal,
    federation,
    run,
)


def test_local_only_is_training_alone() -> None:
    data = Quadratics(CURVATURES, MINIMA)
    together = federation(LocalOnly(), 2, max_epochs=2)
    together.fit(Quadratic(), data)
    assert together.federation.state == {}
    assert all(u.bytes_up == 0 and u.bytes_down == 0 for u in together.federation.log.updates)
    alone = federation(FedAvg(), 2, max_epochs=2)
    alone.fit(Quadratic(), Quadratics(CURVATURES[:1], MINIMA[:1]))
    assert_equal(together.federation.client_state(0), alone.federation.client_state(0))
    left = (1 - 0.05 * 10.0) ** 4
    assert together.federation.client_state(1)["w"].item() == pytest.approx(1 - left)


def test_centralized_spends_the_cohorts_steps_on_the_pooled_data() -> None:
    data = Digits(clients=4, partition=Dirichlet(0.1, min_samples=4))
    settings = {"data": data, "schedule": Synchronous(0.5), "max_epochs": 2, "rounds": 5, "seed": 0}
    pooled = run(Centralized(), model=Classifier(MLP((16,))), **settings)
    cohort = run(FedAvg(), model=Classifier(MLP((16,))), **settings)
    (alone,) = pooled.federation.log.updates
    assert alone.client == POOLED
    assert alone.samples == sum(data.federated.samples(c) for c in range(4))
    assert alone.steps == sum(u.steps for u in cohort.federation.log.updates)
    assert pooled.test()[0]["accuracy"] > 0.85
