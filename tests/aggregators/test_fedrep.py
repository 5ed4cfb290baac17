"""FedRep recovers a shared subspace, and FedBABU never moves its head."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import FedBABU, FedRep
from flsuite.data import DataSpec, FederatedDataModule
from flsuite.data.partitions import Natural
from flsuite.data.spec import DataSplit, PublishedSplits
from flsuite.models import Classifier
from flsuite.models.base import ClientModel
from tests.aggregators.federations import assert_equal, federation, run, table_model

CLIENTS, SAMPLES, FEATURES, RANK = 8, 40, 6, 2


def truth() -> tuple[Tensor, Tensor]:
    """Return the shared subspace ``(features, rank)``, and each client's own weights."""
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(FEATURES, RANK, generator=generator)).Q
    return basis, torch.randn(CLIENTS, RANK, generator=generator)


class Regressions(FederatedDataModule):
    """Client i observes ``x`` and ``(B w_i) . x``, which is the last column."""

    def __init__(self) -> None:
        super().__init__(clients=CLIENTS, partition=Natural(), batch_size=100, val_fraction=0.0)

    def load(self) -> PublishedSplits:
        basis, own = truth()
        owners = torch.arange(CLIENTS).repeat_interleave(SAMPLES)
        x = torch.randn(len(owners), FEATURES, generator=torch.Generator().manual_seed(2))
        y = (x * (own @ basis.T)[owners]).sum(1, keepdim=True)
        split = DataSplit(torch.cat([x, y], 1), owners % 2, owners)
        return PublishedSplits(DataSpec((FEATURES + 1,), 2), split, split)


class Linear(ClientModel):
    head = "own."

    def build(self, spec: DataSpec) -> None:
        self.body = nn.Linear(FEATURES, RANK, bias=False)
        self.own = nn.Linear(RANK, 1, bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch[0][:, :-1], batch[0][:, -1:]
        return (self.own(self.body(x)) - y).square().mean()

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": batch[1] * 0.0, "scores": torch.full((len(batch[1]), 2), 0.5)}

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.long
def test_it_recovers_the_subspace_of_linear_clients() -> None:
    """The principal angles between both subspaces vanish, as in theorem 1."""
    made = federation(FedRep(head_epochs=5), 50, max_epochs=10)
    made.fit(Linear(), Regressions())
    found = torch.linalg.qr(made.federation.state["body.weight"].T).Q
    cosines = torch.linalg.svdvals(found.T @ truth()[0])
    assert cosines.min() > 0.99


def test_the_head_of_fedbabu_is_the_initial_one_everywhere() -> None:
    made = run(FedBABU())
    heads = [made.federation.client_state(c)["network.3.weight"] for c in (None, 0, 1, 3)]
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert "network.3.weight" not in made.federation.state
    assert not torch.equal(
        made.federation.state["network.0.weight"],
        run(FedBABU(), 1).federation.state["network.0.weight"],
    )


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
