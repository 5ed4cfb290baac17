"""FedRoD: a balanced softmax for all, and a head of each client's own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from flsuite import FlsuiteError
from flsuite.aggregators import FedRoD
from flsuite.aggregators.fedrod import TwoHeads
from flsuite.common.client import ClientContext
from flsuite.models import Classifier
from tests.aggregators.federations import run, table_model


def balanced_loss(logits: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Return eq. 6 as it is written: class weights times exponentials."""
    weighted = counts * logits.exp()
    return -(weighted.gather(1, y[:, None])[:, 0] / weighted.sum(1)).log().mean()


@pytest.mark.parametrize("counts", [[6, 3, 0], [0, 9, 0], [4, 3, 2]], ids=str)
def test_an_absent_class_is_not_pushed_down(counts: list[int]) -> None:
    client = ClientContext(0, 1, 9, torch.tensor(counts), {}, {}, {})
    heads = TwoHeads("head.")
    _, held = heads.start(client, {})
    y = torch.tensor(counts).nonzero()[:, 0].repeat(4)
    z = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(1))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(heads.logits(z[None], (None, y[None]), held), y[None])

    def eq_6(z: Tensor) -> Tensor:
        return balanced_loss(z, y, torch.tensor(counts))

    # By sample and at once, as in a stack of clients.
    own = torch.func.vmap(torch.func.grad(loss))(z, y) / len(y)
    torch.testing.assert_close(own, torch.func.grad(eq_6)(z))
    assert own.isfinite().all()
    assert (own[:, torch.tensor(counts) == 0] == 0).all()


class Frozen(Classifier):
    def build(self, spec: Any) -> None:
        super().build(spec)
        self.head.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"head": "network.1"}, Classifier, "needs a linear head"),
        ({"private": ["network."]}, Classifier, "FedRoD averages network"),
        ({}, Frozen, "a part of it is frozen"),
    ],
)
def test_a_head_of_several_layers_private_or_frozen_is_refused(
    settings: Any, kind: type[Classifier], message: str
) -> None:
    with pytest.raises(FlsuiteError, match=message):
        run(FedRoD(**settings), 1, model=table_model(kind))


def test_the_personal_head_steps_at_the_rate_of_the_models_step() -> None:
    """The rate is 0.1 in the first step, and 0 afterwards."""

    class Once(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = LambdaLR(optimizer, lambda step: float(step == 0))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    made = run(FedRoD(), 1, model=table_model(Once))
    personal = made.federation.clients[1]["objective"]["head"]
    assert any(float(value.abs().max()) > 0 for value in personal.values())
