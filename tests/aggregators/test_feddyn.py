"""What FedDyn refuses, and what a callback may read in its fits. Its twin has the rest."""

from typing import Any

import pytest
from lightning.pytorch import Callback

from flsuite import FlsuiteError
from flsuite.aggregators import (
    Aggregator,
    ClipUpdates,
    FedDyn,
    FedExP,
    QFedAvg,
    Quantize,
    TopK,
)
from flsuite.federation import Asynchronous
from tests.aggregators.federations import run


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
