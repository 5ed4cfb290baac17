"""FedDyn reaches the optimum of the sum where FedAvg with many steps does not."""

from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback

from flsuite import FlsuiteError
from flsuite.aggregators import (
    Aggregator,
    ClipUpdates,
    FedAvg,
    FedDyn,
    FedExP,
    QFedAvg,
    Quantize,
    TopK,
)
from flsuite.federation import Asynchronous
from tests.aggregators.federations import CURVATURES, MINIMA, Quadratics, optimum, run


def test_two_quadratic_clients_reach_the_optimum_of_their_sum() -> None:
    a, m = np.array(CURVATURES), np.array(MINIMA)
    best = float((a * m).sum() / a.sum())
    data = Quadratics(CURVATURES, MINIMA)
    assert abs(optimum(FedAvg("uniform"), data, 4, steps=30) - best) > 0.1
    assert optimum(FedDyn(alpha=1.0), data, 12, steps=30) == pytest.approx(best, abs=1e-3)


def test_late_clients_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="needs current models"):
        run(FedDyn(), schedule=Asynchronous(concurrency=2, buffer_size=1))


def test_a_users_callback_can_read_the_gradients() -> None:
    class Reads(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert all(not p.grad.requires_grad for p in pl_module.parameters())

    assert not run(FedDyn(), 1, callbacks=[Reads()]).federation.log.failures


@pytest.mark.parametrize("make", [FedDyn, FedExP, QFedAvg])
def test_changes_that_arrive_shortened_are_refused(make: type[Aggregator]) -> None:
    """Their servers rely on what clients know of their own changes."""
    for transform in (ClipUpdates(0.1), Quantize(8), TopK(0.1)):
        with pytest.raises(FlsuiteError, match="needs exact changes"):
            run(make(transforms=[transform]))
