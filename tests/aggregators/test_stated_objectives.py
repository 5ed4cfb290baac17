"""What an objective stated in functions of tensors may return, read and change, on two engines."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import SGD

from flsuite import FlsuiteError
from flsuite.aggregators import FeatureTerm, FedAvg, Objective, SecondSteps
from flsuite.aggregators.objectives.base import own_tensors
from flsuite.aggregators.rules.after_fit import AfterFit
from flsuite.common.messages import ClientContext
from flsuite.data import Dirichlet
from flsuite.federation import InProcess, Vectorized
from flsuite.models import Classifier
from tests.aggregators.federations import run
from tests.conftest import long
from tests.federation.engines import test_vectorized
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble, close, fitted

stacks = test_vectorized.stacks  # a fixture


class Steps(SecondSteps):
    """A second model that pulls the first one."""

    def start(self, client: ClientContext, module: Any) -> Any:
        return dict(module.state_dict()), {}

    def direction(self, gradient: Any, v: Any, w: Any, held: Any, rate: float) -> Any:
        return gradient, held

    def model_gradient(self, gradient: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return gradient + 0.1 * (w - v)

    def end(self, client: ClientContext, weights: Any, held: Any) -> None:
        client.memory |= {"v": weights, "held": held}


class MeansStayNear(FeatureTerm):
    """Mixes the samples of a batch, and is zero at the start of a fit."""

    def read(self, client: ClientContext, module: Any) -> Any:
        return {"received": client.global_state}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of(held["received"])]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features - others[0]).mean(0).square().sum()


class OfSomeClients(FeatureTerm):
    """Mixes the samples of a batch, but not those of the first client."""

    def read(self, client: ClientContext, module: Any) -> Any:
        return {"weight": torch.tensor(float(client.id > 0), dtype=torch.float64)}

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return held["weight"] * features.mean(0).square().sum()


class FromStart(FeatureTerm):
    """Reads tensors of the model, which its steps change."""

    def read(self, client: ClientContext, module: Any) -> Any:
        return {"start": dict(module.state_dict())}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of(held["start"])]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features - others[0]).square().mean()


class ToStart(Steps):
    """The same with a second model, whose start is in another precision."""

    def start(self, client: ClientContext, module: Any) -> Any:
        weights = {name: value.float() for name, value in module.state_dict().items()}
        return weights, dict(module.named_parameters())

    def direction(self, gradient: Any, v: Any, w: Any, held: Any, rate: float) -> Any:
        return {name: gradient[name] + rate * (v[name] - held[name]) for name in v}, held


class Normed(Steps):
    def model_gradient(self, gradient: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return gradient / (1.0 + gradient.norm())


class Pull(Callback):
    supports_stack = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.add_(parameter.detach(), alpha=0.1)


class AfterPull(Normed):
    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [Pull(), *super().callbacks(client)]


ALIKE = (MeansStayNear(), OfSomeClients(), FromStart(), Steps(), ToStart(), Normed(), AfterPull())


@pytest.mark.parametrize(
    "objective", [*ALIKE[:3], *long(*ALIKE[3:])], ids=lambda one: type(one).__name__
)
def test_clients_of_a_stack_train_as_alone(objective: Objective, stacks: list[int]) -> None:
    data = Images(clients=6, partition=Dirichlet(1.0), batch_size=8, val_fraction=0.0)
    model = Classifier(InDouble(), partial(SGD, lr=0.01))
    close(stacks, 1e-12, FedAvg(objective=objective), model, data)


def test_tensors_of_the_model_are_copied_and_others_shared() -> None:
    module, other = LightningModule(), torch.zeros(())
    module.register_buffer("steps", torch.zeros(()), persistent=False)
    kept = own_tensors(FeatureTerm(), "read", {"own": module.steps, "other": other}, module)
    assert kept["own"] is not module.steps and kept["other"] is other


def test_what_a_client_keeps_of_a_stack_is_its_own(stacks: list[int]) -> None:
    made = fitted(Vectorized(clients=4), FedAvg(objective=ToStart()))
    kept = [made.federation.clients[client]["objective"]["held"] for client in range(4)]
    assert stacks
    for value in (value for held in kept for value in held.values()):
        assert value.untyped_storage().nbytes() == value.nbytes


class OfEachSample(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return 0.0 * features.square().mean(1)


class OneFeature(FeatureTerm):
    def compared(self, features_of: Any, held: Any) -> Any:
        return features_of({})


class InCompared(FeatureTerm):
    """Changes the global model in place."""

    def read(self, client: ClientContext, module: Any) -> Any:
        return {"bias": client.global_state["network.3.bias"]}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        held["bias"].add_(0.5)
        return []


class ReadsNumbers(FeatureTerm):
    def read(self, client: ClientContext, module: Any) -> Any:
        return {"samples": client.samples}


class OnlyWeights(Steps):
    def start(self, client: ClientContext, module: Any) -> Any:
        return dict(module.state_dict())


class SomePoint(Steps):
    def point(self, v: Any, w: Any, held: Any) -> Any:
        return dict([*v.items()][:2])


class OtherNames(Steps):
    def direction(self, gradient: Any, v: Any, w: Any, held: Any, rate: float) -> Any:
        return {f"module.{name}": value for name, value in gradient.items()}, held


class OnlyGradient(Steps):
    def direction(self, gradient: Any, v: Any, w: Any, held: Any, rate: float) -> Any:
        return gradient


class NoGradient(Steps):
    def model_gradient(self, gradient: Tensor, w: Tensor, v: Tensor) -> Any:
        gradient + 1.0


class Averages(FeatureTerm):
    """Changes in place what it holds."""

    def read(self, client: ClientContext, module: Any) -> Any:
        return {"mean": torch.zeros(())}

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        held["mean"].mul_(0.9).add_(features.detach().mean(), alpha=0.1)
        return (features.mean() - held["mean"]).square()


class Shrinks(Steps):
    """Changes the global model in place."""

    def start(self, client: ClientContext, module: Any) -> Any:
        return dict(module.state_dict()), client.global_state

    def direction(self, gradient: Any, v: Any, w: Any, held: Any, rate: float) -> Any:
        held["network.3.bias"].mul_(0.9)
        return gradient, held


class ReplacesInTerm(Averages):
    """Puts another tensor in the place of what it holds."""

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        held["mean"] = held["mean"] + 1
        return features.square().mean() * held["mean"]


class ChangesGlobal(FeatureTerm):
    def read(self, client: ClientContext, module: Any) -> Any:
        client.global_state["network.3.bias"].mul_(1.01)
        return {}


class FewLogits(FeatureTerm):
    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Any:
        return outputs[:, :1]


class OtherEntry(Steps):
    def start(self, client: ClientContext, module: Any) -> Any:
        return {"foo": torch.zeros(())}, {}


class NoList(Objective):
    def callbacks(self, client: ClientContext) -> Any:
        return Pull()


WRONG = {
    OfEachSample: r"term returned Tensor of shape \(\d+,\); return the mean over the samples",
    OneFeature: r"compared returned Tensor of shape \(16, 8\); return a list of tensors",
    ReadsNumbers: "read returned int; return tensors in dictionaries",
    InCompared: "InCompared changes what it reads of the client; make new tensors",
    OnlyWeights: "start returned dict; return weights, and what else the steps hold",
    SomePoint: "point returned dict; return all entries of v: network",
    OtherNames: r"direction returned tuple; return a gradient of entries as in v \(network",
    OnlyGradient: r"direction returned dict; return a gradient of entries as in v \(network",
    NoGradient: "model_gradient returned None; return a tensor of the gradient's shape",
    Averages: "Averages changes what it reads of the client; make new tensors",
    ReplacesInTerm: "ReplacesInTerm changes what it reads of the client",
    ChangesGlobal: "ChangesGlobal changes what it reads of the client",
    FewLogits: r"logits returned Tensor of shape \(\d+, 1\); return logits of the outputs' shape",
    OtherEntry: "OtherEntry.start returned weights of foo, which the model does not have",
    NoList: "NoList.callbacks returned Pull; return a list of callbacks",
    Shrinks: "Shrinks changes what it reads of the client; make new tensors",
}


@pytest.mark.parametrize("engine", [InProcess(), Vectorized()], ids=["alone", "stacked"])
@pytest.mark.parametrize(
    ("kind", "match"), WRONG.items(), ids=lambda one: getattr(one, "__name__", "")
)
def test_wrong_returns_are_named(kind: Callable[[], Objective], match: str, engine: Any) -> None:
    with pytest.raises(FlsuiteError, match=match):
        run(FedAvg(objective=kind()), 1, engine=engine)


def test_a_head_that_the_model_lacks_is_refused_before_the_first_round() -> None:
    with pytest.raises(FlsuiteError, match=r"^trainer.aggregator.objective.head: .* 'nope'; it"):
        run(FedAvg(objective=MeansStayNear("nope.")), 1)


class Measured(AfterFit):
    def after_fit(self, module: Any, loader: Any) -> None:
        self.client.metrics["measured"] = 1.0


class MeasuresSome(FeatureTerm):
    def callbacks(self, client: ClientContext) -> list[Callback]:
        measured = [Measured(client)] if client.id in (1, 2) else []
        return [*super().callbacks(client), *measured]


def test_a_stack_measures_the_clients_that_are_to_be_measured(stacks: list[int]) -> None:
    made = run(FedAvg(objective=MeasuresSome()), 1, engine=Vectorized())
    updates = made.federation.log.updates
    assert stacks and [one.client for one in updates if "measured" in one.metrics] == [1, 2]
