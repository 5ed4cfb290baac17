"""MOON's term acts like a loss with it, whatever the head and the batches."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import MOON, FeatureTerm, FedAvg, FedProto, FedRep, FedRoD, Proximal
from flsuite.aggregators.aggregator import Aggregator
from flsuite.data import Synthetic
from flsuite.models import MLP, Classifier
from flsuite.models.backbones import Backbone
from tests.aggregators.federations import run, table_model


class _Squares(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return 0.3 * features.square().sum(1).mean()


def test_a_term_of_the_features_acts_like_a_loss_with_it() -> None:
    class WithTerm(type(table_model())):  # type: ignore[misc]
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            features = self.network[:3](x)
            loss = F.cross_entropy(self.network[3](features), y)
            return loss + 0.3 * features.square().sum(1).mean()

    plain = table_model()
    by_loss = run(FedAvg(), 2, model=WithTerm(plain.backbone, plain.optimizer))
    by_hook = run(Aggregator(objective=_Squares("network.3.")), 2)
    for name, value in by_loss.federation.state.items():
        torch.testing.assert_close(by_hook.federation.state[name], value)


def test_the_term_counts_once_when_batches_are_accumulated() -> None:
    """Two accumulated batches are one step with the mean of their gradients."""
    made = [
        run(
            Aggregator(objective=_Squares("network.2.")),
            1,
            Synthetic(
                features=5, classes=3, samples=60, clients=1, batch_size=size, val_fraction=0.0
            ),
            model=Classifier(MLP((8,)), partial(SGD, lr=0.05)),
            accumulate_grad_batches=batches,
        )
        for size, batches in ((24, 2), (48, 1))
    ]
    for name, value in made[0].federation.state.items():
        torch.testing.assert_close(made[1].federation.state[name], value)


def test_a_head_may_change_its_input_in_place() -> None:
    def end(inplace: bool) -> dict[str, Tensor]:
        class Net(Backbone):
            def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
                head = nn.Sequential(nn.ReLU(inplace), nn.Linear(8, outputs))
                return nn.Sequential(nn.Linear(shape[0], 8), head)

        model = Classifier(Net(), partial(SGD, lr=0.05))
        return run(MOON(mu=5.0, head="network.1"), 3, model=model).federation.state

    out_of_place, in_place = end(False), end(True)
    assert all(torch.equal(v, in_place[k]) for k, v in out_of_place.items())


@pytest.mark.parametrize("make", [MOON, FedProto, FedRep, FedRoD])
def test_an_objective_of_the_config_is_not_dropped(make: type[Aggregator]) -> None:
    with pytest.raises(FlsuiteError, match="an objective of its own; leave Proximal out"):
        run(make(objective=Proximal(1.0)), 1, max_epochs=2)
