"""FedRep trains its head and its body in turn."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flsuite import FlsuiteError
from flsuite.aggregators import FedRep
from flsuite.models import Classifier
from tests.aggregators.federations import assert_equal, run, table_model

CLIENTS, SAMPLES, FEATURES, RANK = 8, 40, 6, 2


def test_a_phase_leaves_the_other_part_alone() -> None:
    """After a first epoch for the head, and a second one for the body, both have moved."""
    with pytest.raises(FlsuiteError, match="max_epochs to at least 2"):
        run(FedRep(), 1, max_epochs=1)
    with pytest.raises(FlsuiteError, match="max_steps to more than"):
        run(FedRep(), 1, max_epochs=5, max_steps=1)
    made = run(FedRep(), 1, max_epochs=2)
    other = run(FedRep(), 1, max_epochs=3)
    heads = [m.federation.clients.private(0)["network.3.weight"] for m in (made, other)]
    assert torch.equal(*heads), "the third epoch trains the body alone"
    assert not torch.equal(
        made.federation.state["network.0.weight"], other.federation.state["network.0.weight"]
    )


def test_a_fit_that_restarts_trains_both_parts() -> None:
    """A model that logs leaves the fast loop in the middle of its first fit."""

    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("own", loss)
            return loss

    made = run(FedRep(), 2, max_epochs=2, model=table_model(Logs))
    assert_equal(made.federation.state, run(FedRep(), 2, max_epochs=2).federation.state)
