"""FedRoD: a balanced softmax for all, and a head of each client's own."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from flsuite import FlsuiteError
from flsuite.aggregators import FedAvg, FedRoD
from flsuite.data import Dirichlet, Synthetic
from tests.aggregators.federations import run, table_model


def skewed(alpha: float) -> Synthetic:
    return Synthetic(
        features=5, classes=3, samples=600, clients=4, batch_size=16, partition=Dirichlet(alpha, 4)
    )


def test_the_generic_logits_grow_by_the_log_of_class_counts() -> None:
    from torch.nn import functional as F

    from flsuite.aggregators.fedrod import TwoHeads
    from flsuite.messages import ClientContext

    client = ClientContext(0, 1, 100, torch.tensor([90, 10, 0]), {}, {}, {})
    heads, model = TwoHeads("head."), table_model()
    batch = None, torch.zeros(1).long()
    logits = heads.logits(torch.zeros(1, 3), batch, heads.read(client, model))
    assert torch.equal(logits, torch.tensor([[90.0, 10.0, 1.0]]).log())
    assert F.softmax(logits, 1)[0, 0] == pytest.approx(90 / 101)


def test_a_client_is_scored_by_the_sum_of_both_heads() -> None:
    made = run(FedRoD(), 3)
    own, personal = made.federation.client_state(1), made.federation.clients[1]["objective"]["head"]
    for name, value in personal.items():
        torch.testing.assert_close(own[name], made.federation.state[name] + value)
    assert set(personal) == {"network.3.weight", "network.3.bias"}
    assert (
        made.federation.log.updates[0].bytes_up
        == run(FedAvg(), 1).federation.log.updates[0].bytes_up
    )


@pytest.mark.long
def test_clients_with_few_classes_gain_by_their_own_head() -> None:
    made = run(FedRoD(), 15, skewed(0.1), evaluate_every=15)
    scores = made.callback_metrics
    average = run(FedAvg(), 15, skewed(0.1), evaluate_every=15).callback_metrics
    assert scores["test/accuracy_client_mean"] > average["test/accuracy_client_mean"]


def test_a_head_of_several_layers_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="needs a linear head"):
        run(FedRoD(head="network.1"))


def test_a_private_head_is_refused() -> None:
    with pytest.raises(FlsuiteError, match="FedRoD averages network"):
        run(FedRoD(private=["network."]))


def test_the_personal_head_follows_schedule_and_clipping() -> None:
    """With gradients clipped to nothing, neither the model nor the head moves."""
    made = run(FedRoD(), 1, gradient_clip_val=1e-9)
    personal = made.federation.clients[1]["objective"]["head"]
    assert all(float(value.abs().max()) < 1e-8 for value in personal.values())


def test_the_personal_head_steps_at_the_rate_of_the_models_step() -> None:
    """The rate is 0.1 in the first step, and 0 afterwards."""

    class Once(type(table_model())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = LambdaLR(optimizer, lambda step: float(step == 0))
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    plain = table_model()
    made = run(FedRoD(), 1, model=Once(plain.backbone, plain.optimizer))
    personal = made.federation.clients[1]["objective"]["head"]
    assert any(float(value.abs().max()) > 0 for value in personal.values())


def test_a_frozen_head_is_refused() -> None:
    class Frozen(type(table_model())):  # type: ignore[misc]
        def build(self, spec: Any) -> None:
            super().build(spec)
            self.head.bias.requires_grad_(False)

    plain = table_model()
    with pytest.raises(FlsuiteError, match="a part of it is frozen"):
        run(FedRoD(), 1, model=Frozen(plain.backbone, plain.optimizer))
