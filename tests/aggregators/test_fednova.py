"""The worth of FedNova's steps, by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from flsuite.aggregators import FedNova
from flsuite.aggregators.fednova import NormalizedMean
from flsuite.common.client import ClientContext, Taken
from flsuite.common.state import StateLayout
from flsuite.data import Digits, Synthetic
from flsuite.models import MLP, Classifier, FusedSpaceFed
from tests.aggregators.federations import run, table_model


def worth(mu: float = 0.0, rounds: int = 1, kind: Any = Classifier, **settings: Any) -> float:
    """Return the worth of the last fit of one client, which takes four steps by default."""
    data = Synthetic(samples=60, clients=1, batch_size=1000)
    model = table_model(kind, **settings.pop("optimizer", {}))
    made = run(FedNova(mu), rounds, data, model=model, **{"max_epochs": 4, **settings})
    return made.federation.log.server["tau_eff"]


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.3), (0.9, 0.3)])
def test_the_worth_of_a_fits_steps(momentum: float, mu: float) -> None:
    """Equation 9's norms: with momentum, and with a proximal term, as in section 3."""
    rate, steps = 0.1, 4
    by_hand, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - mu * rate * by_hand
        by_hand += velocity
    if not momentum:
        closed = steps if not mu else (1 - (1 - rate * mu) ** steps) / (rate * mu)
        assert by_hand == pytest.approx(closed)
    elif not mu:
        factors = (1 - np.array([momentum**k for k in range(steps, 0, -1)])) / (1 - momentum)
        assert by_hand == pytest.approx(factors.sum())
    assert worth(mu, optimizer={"lr": rate, "momentum": momentum}) == pytest.approx(by_hand)


def test_a_kept_momentum_counts_in_the_next_fit() -> None:
    """The worth of a fit goes on from the momentum, as the model's own steps do."""
    momentum = {"lr": 0.1, "momentum": 0.9}
    second = worth(rounds=2, optimizer=momentum, max_epochs=3, keep_optimizers=True)
    velocities = [sum(0.9**k for k in range(step + 1)) for step in range(6)]
    assert second == pytest.approx(sum(velocities[3:]))


def test_a_fit_without_steps_leaves_the_kept_momentum() -> None:
    """As when a gradient scaler skips all steps: the model's own optimizer keeps it, too."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    options = [{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}]
    memory: dict[str, Any] = {}

    def worth_of(steps: int) -> float:
        taken = [Taken(optimizer, options, frozenset({"w"}), steps)] if steps else []
        fit: Any = SimpleNamespace(taken=taken, optimizers=[optimizer], continues=bool(memory))
        layout = StateLayout(("w",), 1)
        client = ClientContext(0, 1, 1, torch.ones(1), {}, {}, memory, layout=layout, fit=fit)
        NormalizedMean().end(client, {}, {})
        return client.extras["plain_steps"]

    assert [worth_of(1), worth_of(0), worth_of(1)] == pytest.approx([1.0, 0.0, 1.9])


def test_a_momentum_that_is_not_kept_does_not_count() -> None:
    momentum = {"lr": 0.1, "momentum": 0.9}
    assert worth(rounds=2, optimizer=momentum) == pytest.approx(worth(optimizer=momentum))


def test_a_schedule_may_change_the_momentum() -> None:
    class Cycled(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.optimizers[0].param_groups[0]["momentum"] = 0.0

    assert worth(kind=Cycled, optimizer={"lr": 0.1, "momentum": 0.9}) == pytest.approx(4.0)


def test_the_optimizer_of_the_shared_layers_is_counted() -> None:
    """The first optimizer has private ones, and its steps set the others' gradients to none."""

    class Toggled(Classifier):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, private=("network.1",), **kwargs)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            own = [p for k, p in self.named_parameters() if k.startswith("network.1")]
            rest = [p for k, p in self.named_parameters() if not k.startswith("network.1")]
            return [SGD(own, lr=0.1), SGD(rest, lr=0.1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                self.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    assert worth(kind=Toggled) == pytest.approx(4.0)


def test_of_two_optimizers_the_models_first_one_is_counted() -> None:
    class Two(Classifier):
        """Its second optimizer steps first, and twice per batch."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            bias, *rest = reversed(list(self.parameters()))
            return [SGD(rest, lr=0.1), SGD([bias], lr=0.1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer in (second, second, first):
                self.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    assert worth(kind=Two) == pytest.approx(4.0)


def test_a_warm_up_of_private_layers_counts_no_steps() -> None:
    """Three batches of a warm-up epoch move the encoder alone, and three the rest."""
    model = FusedSpaceFed(latent_dim=4, backbone=MLP((8,)), warmup_epochs=1, momentum=0.0)
    data = Digits(clients=1, train_samples=96, batch_size=32, val_fraction=0.0)
    made = run(FedNova(), 1, data, model=model)
    assert made.federation.log.server["tau_eff"] == pytest.approx(3.0)
