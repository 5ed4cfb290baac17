"""Losses at other weights, and second models, in fits of every kind."""

import copy
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torchmetrics import MeanMetric

from flsuite import FederatedTrainer, FlsuiteError, aggregators as methods
from flsuite.aggregators import (
    APFL,
    IFCA,
    MOON,
    Ditto,
    FedALA,
    FedAvg,
    FedProto,
    FedRoD,
    QFedAvg,
    Quantize,
    TopK,
)
from flsuite.aggregators.objectives.base import second_start
from flsuite.common.client import ClientContext, ClientFit
from flsuite.common.state import State, StateLayout
from flsuite.data import IID, Digits, Synthetic
from flsuite.models import CNN, Classifier
from flsuite.models.backbones import Backbone
from tests.aggregators.federations import Normalised, assert_same_tree, models_of, run, table_model
from tests.conftest import long, mostly_long, table, trainer

HESSIAN_FREE = partial(methods.PerFedAvg, order="hessian_free")
MIXED = partial(methods.PFedMe, lam=1.0)
CLIPPED = methods.ClipUpdates(0.05)
EXTRA_STEPS = {
    "ditto": Ditto,
    "apfl": APFL,
    "moon": MOON,
    "pfedme": partial(methods.PFedMe, lam=1.0, steps=2),
    "hessian_free": HESSIAN_FREE,
    "fedala": FedALA,
}


@cache
def batches_tracked(make: Any) -> int:
    made = trainer(rounds=2, max_epochs=2, aggregator=make(), batchnorm="local")
    model = Classifier(CNN(channels=(2, 4), hidden=(8,), norm="batch"))
    # With ten samples per batch, FedALA's share of them would leave a batch of one.
    data = Digits(clients=3, partition=IID(), train_samples=156, batch_size=10, val_fraction=0.0)
    made.fit(model, data)
    own = made.federation.clients.private(0)
    counters = {int(own[name]) for name in own if name.endswith("num_batches_tracked")}
    assert len(counters) == 1 and all(value.isfinite().all() for value in own.values())
    return counters.pop()


@pytest.mark.parametrize("make", mostly_long(EXTRA_STEPS, "ditto", "fedala"))
def test_steps_at_other_weights_do_not_count_in_the_models_own_statistics(make: Any) -> None:
    assert batches_tracked(make) == batches_tracked(FedAvg)


class Tied(Backbone):
    """Two layers with the same weights, and dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        first, second = nn.Linear(shape[0], shape[0]), nn.Linear(shape[0], shape[0])
        second.weight = first.weight
        head = nn.Linear(shape[0], outputs)
        return nn.Sequential(first, nn.Tanh(), nn.Dropout(self.dropout), second, head)


class TwoLayers(nn.ModuleDict):
    """The same function as :class:`Tied`, with one name for the weight of two layers."""

    def __init__(self, layers: nn.Sequential) -> None:
        second = nn.Module()
        second.bias = nn.Parameter(layers[3].bias.detach())
        super().__init__({"0": layers[0], "3": second, "4": layers[4]})

    def forward(self, x: Tensor) -> Tensor:
        first, second, head = self.values()
        hidden = torch.tanh(first(x))
        return head(nn.functional.linear(hidden, first.weight, second.bias))


class Once(Backbone):
    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return TwoLayers(Tied().build(shape, outputs))


def fitted(
    aggregator: Any, dropout: float = 0.0, backbone: Backbone | None = None, **kwargs: Any
) -> FederatedTrainer:
    model = Classifier(backbone or Tied(dropout), partial(SGD, lr=0.1))
    return run(aggregator, 2, model=model, max_epochs=2, **kwargs)


@pytest.mark.parametrize("make", [Ditto, partial(APFL, 0.0, adaptive=False)])
def test_random_draws_of_the_model_stay_those_of_fedavg(make: Any) -> None:
    own, plain = fitted(make(), dropout=0.5), fitted(FedAvg(), dropout=0.5)
    assert_same_tree(own.federation.state, plain.federation.state)


def test_a_personal_model_draws_like_the_clients_own() -> None:
    own, alone = fitted(Ditto(lam=0.0), dropout=0.5), fitted(methods.LocalOnly(), dropout=0.5)
    assert_same_tree(models_of(own), models_of(alone))


@pytest.mark.parametrize(
    "make",
    [
        Ditto,
        FedALA,
        QFedAvg,
        methods.FedExP,
        partial(methods.SCAFFOLD, control="mean_gradient"),
        partial(methods.DPFedAvg, clip=0.1, noise_multiplier=1.0, delta=0.01),
        partial(FedAvg, transforms=[TopK(0.2)]),
        *long(APFL, MIXED, HESSIAN_FREE, MOON, FedRoD, FedProto, IFCA),
        *long(methods.FedNova, methods.FedDyn, methods.GeometricMedian),
        *long(*(partial(FedAvg, transforms=[one]) for one in (CLIPPED, Quantize(4)))),
    ],
)
def test_tied_weights_are_one_weight(make: Any) -> None:
    """Noise, norms and choices of numbers see them once."""
    tied, once = (fitted(make(), backbone=kind()) for kind in (Tied, Once))
    assert_same_tree(models_of(tied), models_of(once))


class WarmUp(Classifier):
    """A classifier whose learning rate begins at zero."""

    def configure_optimizers(self) -> Any:
        schedule = LambdaLR(self.optimizer(self.parameters()), lambda step: min(1.0, step / 3))
        return stepped_with(schedule)


def stepped_with(schedule: LRScheduler) -> dict[str, Any]:
    scheduler = {"scheduler": schedule, "interval": "step"}
    return {"optimizer": schedule.optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize("make", [methods.FedNova, partial(QFedAvg, q=0.0)])
def test_a_warm_up_from_zero(make: Any) -> None:
    made = run(make(), 2, model=table_model(WarmUp), max_epochs=3)
    assert all(value.isfinite().all() for value in made.federation.state.values())


class Manual(Classifier):
    """A classifier that takes its own steps."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_personal_model_that_is_not_finite_is_refused_and_named(caplog: Any) -> None:
    run(Ditto(lam=1e30), 1)
    assert "private entry personal.network" in caplog.text
    assert "lower the learning rate" in caplog.text


class Described(Classifier):
    """A classifier whose batches are dicts."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1]} if self.trainer.training else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


class OneArgument(Classifier):
    """A classifier whose step takes the batch alone."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch, 0)


@cache
def plain_state(make: Any) -> State:
    return run(make()).federation.state


@pytest.mark.parametrize("make", [Ditto, IFCA, QFedAvg, *long(FedALA, MOON)])
def test_batches_may_be_dicts_and_a_step_may_take_the_batch_alone(make: Any) -> None:
    for kind in (OneArgument, Described):
        assert_same_tree(run(make(), model=table_model(kind)).federation.state, plain_state(make))


class Counting(Classifier):
    """A classifier that counts its steps, and logs a metric of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self.seen = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen.update(1.0)
        self.log("steps", float(self.steps))
        self.log("seen", self.seen.weight)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [MOON, *long(Ditto, QFedAvg, IFCA, FedALA)])
def test_metrics_and_counters_of_the_model_count_its_own_steps(make: Any) -> None:
    own, plain = (table(run(one(), model=table_model(Counting))) for one in (make, FedAvg))
    for name in ("steps", "seen"):
        key = 2, "1", "train", name
        assert own[key] == plain[key] > 0


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx else super().training_step(batch, batch_idx)


class Halves(Classifier):
    """Changes its batch in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0].mul_(0.5), batch[1]), batch_idx)


@pytest.mark.parametrize(
    ("makes", "model", "message"),
    [
        ([QFedAvg], table_model(lr=0.0), "learning rate, which is 0"),
        ([Ditto, APFL, MIXED, MOON, IFCA, QFedAvg], table_model(Manual), "manual optimization"),
        ([methods.PerFedAvg], table_model(Manual), "change the model"),
        ([methods.PerFedAvg], Classifier(Normalised(), optimizer=LBFGS), "not LBFGS"),
        ([FedRoD, FedProto], table_model(Described), "needs batches of inputs and classes"),
        ([Ditto], table_model(Skips), "Skips returned None"),
        (
            [MOON, Ditto, FedRoD, methods.PerFedAvg],
            table_model(Halves),
            "Halves changes in place .* a batch, .* make new tensors",
        ),
        ([Ditto], Classifier(Normalised(), optimizer=LBFGS), "choose another optimizer"),
    ],
    ids=[
        *("rate 0", "manual", "manual meta", "LBFGS meta"),
        *("no classes", "no loss", "in place", "LBFGS"),
    ],
)
def test_a_fit_that_a_method_cannot_follow_is_refused_by_name(
    makes: list[Any], model: Classifier, message: str
) -> None:
    for make in makes:
        with pytest.raises(FlsuiteError, match=message):
            run(make(), model=copy.deepcopy(model))


@pytest.mark.parametrize("make", [Ditto, APFL, FedRoD, methods.PerFedAvg, MIXED])
def test_batches_that_make_one_step_together_are_refused(make: Any) -> None:
    with pytest.raises(FlsuiteError, match=r"leave out (trainer\.)?accumulate_grad_batches"):
        run(make(), 1, accumulate_grad_batches=2)


@pytest.mark.parametrize("batchnorm", ["average", "local", "reset"])
def test_buffers_of_a_personal_model_are_those_of_a_client_alone(batchnorm: str) -> None:
    own, alone = (run(one, 3, batchnorm=batchnorm) for one in (Ditto(lam=0.0), methods.LocalOnly()))
    if batchnorm == "average":  # LocalOnly keeps its buffers, too
        batchnorm = "local"
    assert_same_tree(models_of(own), models_of(alone))


def test_a_reset_buffer_stays_reset_even_if_the_global_one_has_the_same_numbers() -> None:
    w = nn.BatchNorm1d(2).state_dict()
    layout = StateLayout(("weight", "bias"), 1, buffers=("running_mean", "running_var"))
    kept = {**w, "running_mean": torch.ones(2)}
    for reset, mean in ((), 1.0), (("running_mean",), 0.0):
        client = ClientContext(0, 1, 1, torch.ones(1), w, {}, {})
        client.layout = replace(layout, reset=reset)
        client.fit = cast(ClientFit, SimpleNamespace(buffers=["running_mean", "running_var"]))
        assert second_start(client, w, kept)["running_mean"].tolist() == [mean, mean]


class Unused(Backbone):
    """A network with a layer that it does not use."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        network = nn.Linear(shape[0], outputs)
        network.unused = nn.Linear(2, 2)
        return network


class Own(SGD):
    """An optimizer with an attribute of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra = 1.0

    def step(self, closure: Any = None) -> Any:
        assert self.extra
        return super().step(closure)


def test_a_parameter_without_gradient_and_a_schedule_of_momentum_are_followed() -> None:
    class Cycled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = Own(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            return stepped_with(OneCycleLR(optimizer, max_lr=0.1, total_steps=200))

    own, alone = (
        run(one, 2, model=Cycled(Unused())) for one in (Ditto(lam=0.0), methods.LocalOnly())
    )
    assert_same_tree(models_of(own), models_of(alone))


def test_tied_weights_with_one_private_name_are_refused() -> None:
    with pytest.raises(FlsuiteError, match="are the same weights"):
        fitted(FedAvg(private=["network.3."]))


def test_what_a_client_takes_is_learned_on_one_sample_too() -> None:
    data = Synthetic(features=5, classes=3, samples=60, clients=4, batch_size=16)
    made = run(FedALA(samples=0.01), 3, data)
    assert made.round == 3 and not made.federation.log.failures


def test_other_models_than_the_first_are_not_stepped_or_clipped() -> None:
    with pytest.raises(FlsuiteError, match="leave it out"):
        IFCA(server_optimizer=partial(SGD, lr=0.1))
    with pytest.raises(FlsuiteError, match="one of several models"):
        run(IFCA(transforms=[CLIPPED]))
