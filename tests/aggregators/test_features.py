"""What an algorithm may change around the head, in one fit and in a stack of clients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from flsuite import FlsuiteError
from flsuite.aggregators import (
    MOON,
    Aggregator,
    Ditto,
    FeatureTerm,
    FedAvg,
    FedRoD,
    Objective,
    PerFedAvg,
)
from flsuite.aggregators.ditto import PulledModel
from flsuite.aggregators.objectives.feature_term import FeatureCallback, refuse_mixed_samples
from flsuite.common.messages import ClientContext
from flsuite.data import IID
from flsuite.federation import InProcess, Vectorized
from flsuite.models import MLP, Backbone, Classifier
from tests.aggregators.federations import reference, run, table_data, table_model
from tests.federation.engines import test_vectorized
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble, close, distance

stacks = test_vectorized.stacks  # a fixture
HEAD = "network.3."


class Scaled(FeatureTerm):
    def read(self, client: ClientContext, module: Any) -> Any:
        return {"shift": torch.arange(float(module.head.out_features))}

    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Tensor:
        return outputs * 2 + held["shift"]


class Squares(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return 0.3 * features.square().mean()


class Near(FeatureTerm):
    def read(self, client: ClientContext, module: Any) -> Any:
        return {"start": {k: v.detach().clone() for k, v in module.state_dict().items()}}

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of(held["start"])]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features - others[0]).square().mean()


class WithoutGradient(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return torch.ones(())


class EndsBatches(FeatureCallback):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)


class SetUp(FeatureCallback):
    def setup(self, *args: Any, **kwargs: Any) -> None: ...


class Writes(FeatureCallback):
    """Reads a batch where DPSGD adds its noise."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.head.bias.grad.add_(self._batch[0].sum())


@dataclass(frozen=True)
class Given(Objective):
    """The callbacks of another objective after or before some of its own."""

    make: Callable[[ClientContext], list[Callback]]
    other: Objective | None = None
    is_first: bool = True

    def callbacks(self, client: ClientContext) -> list[Callback]:
        own, theirs = self.make(client), self.other.callbacks(client) if self.other else []
        return own + theirs if self.is_first else theirs + own


def of(*kinds: type[FeatureTerm], head: str = HEAD, **kwargs: Any) -> Aggregator:
    terms = [kind(head) for kind in kinds]

    def make(client: ClientContext) -> list[Callback]:
        return [callback for term in terms for callback in term.callbacks(client)]

    return FedAvg(objective=Given(make, **kwargs))


def by(kind: type[FeatureCallback], head: str = HEAD) -> Aggregator:
    term = Squares(head)
    return FedAvg(objective=Given(lambda client: [kind(client, term)]))


IN_DOUBLE = Classifier(InDouble(), partial(SGD, lr=0.01))
DOUBLE: dict[str, Any] = {"model": IN_DOUBLE, "rounds": 1, "max_epochs": 1}


@pytest.mark.parametrize(
    ("kind", "other", "is_first"),
    [
        (Scaled, None, True),
        (Squares, Ditto(lam=0.5), True),
        (Scaled, PerFedAvg(0.05), True),
        (Squares, PerFedAvg(0.05, "hessian_free", delta=0.1), False),
    ],
)
def test_it_changes_the_models_own_loss_alone(
    kind: type[FeatureTerm], other: Aggregator | None, is_first: bool, stacks: list[int]
) -> None:
    objective = other.objective if other else None
    aggregator = of(kind, head="network.5.", other=objective, is_first=is_first)
    data = Images(clients=5, partition=IID(), batch_size=16, val_fraction=0.0)
    close(stacks, 1e-12, aggregator, data=data, **DOUBLE)


@pytest.mark.parametrize(
    "aggregator", [of(Scaled, Squares), by(EndsBatches), by(SetUp)], ids=["two", "a hook", "setup"]
)
def test_what_a_stack_cannot_do_is_refused(aggregator: Aggregator) -> None:
    with pytest.raises(FlsuiteError, match="does more in a client's steps"):
        run(aggregator, 1, engine=Vectorized())
    run(aggregator, 1)


class OwnTerm(FeatureTerm):
    """Holds a client, so that there is one for each."""

    def __init__(self, client: ClientContext) -> None:
        super().__init__(HEAD)
        self.client = client

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return self.client.samples / 30 * features.square().mean()


def test_an_objective_of_each_client_trains_client_by_client(stacks: list[int]) -> None:
    aggregator = FedAvg(objective=Given(lambda client: OwnTerm(client).callbacks(client)))
    alone, stacked = (run(aggregator, 1, engine=engine) for engine in (InProcess(), Vectorized()))
    assert distance(alone, stacked) == 0.0 and not stacks


def test_a_term_may_be_a_constant() -> None:
    assert distance(run(of(WithoutGradient)), reference(FedAvg)) == 0.0


class Bypassing(Classifier):
    """Reads the weights of its head, and does not call it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.network[:-1](batch[0])
        return F.cross_entropy(F.linear(z, self.head.weight, self.head.bias), batch[1])


@pytest.mark.parametrize(
    ("aggregator", "engine"),
    [(of(Squares), InProcess()), (FedRoD(), Vectorized())],
    ids=["a term alone", "FedRoD stacked"],
)
def test_a_head_that_no_step_calls_is_refused(engine: Any, aggregator: Aggregator) -> None:
    with pytest.raises(FlsuiteError, match=r"no training step of Bypassing calls it|clients"):
        run(aggregator, 1, model=table_model(Bypassing), engine=engine)


class Sometimes(Classifier):
    """Every second loss does not read the head."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            return self.network[:-1](batch[0]).square().mean()
        return super().training_step(batch, batch_idx)


def test_a_loss_without_the_head_moves_no_personal_head() -> None:
    made = run(FedRoD(), 1, model=table_model(Sometimes))
    assert len(made.federation.log.updates) == 4 and not made.federation.log.failures


class Counted(FeatureTerm):
    terms = 0

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        Counted.terms += 1
        return features.square().mean()


class Checkpointed(nn.Sequential):
    """Computes its layers again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return out


@dataclass(eq=False)
class Layers(Backbone):
    kind: type[nn.Sequential] = nn.Sequential

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return self.kind(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, outputs))


@pytest.mark.parametrize("make", [Ditto, PerFedAvg, MOON])
def test_checkpointed_layers_train_as_others(make: Callable[[], Aggregator]) -> None:
    made = [
        run(make(), 2, table_data(2, 60), model=Classifier(Layers(kind), partial(SGD, lr=0.1)))
        for kind in (nn.Sequential, Checkpointed)
    ]
    for client in range(2):
        one, other = (each.federation.client_state(client) for each in made)
        assert all(torch.equal(one[name], other[name]) for name in one)


class Slower(PulledModel):
    """Steps of a second model by a user's own class."""


@pytest.mark.long
@pytest.mark.parametrize(
    "aggregator",
    [of(Scaled), by(Writes), by(EndsBatches), FedAvg(objective=Slower(0.1))],
    ids=["Scaled", "Writes", "EndsBatches", "Slower"],
)
def test_with_sample_privacy_only_a_term_may_see_samples(
    aggregator: Aggregator, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("opacus", reason="needs Opacus: pip install 'flsuite[privacy]'")
    from flsuite.callbacks import DPSGD

    name = request.node.callspec.id
    with pytest.raises(FlsuiteError, match=f"DPSGD: {name}.* sees samples"):
        run(aggregator, 1, callbacks=[DPSGD()], model=Classifier(MLP(hidden=(8,))))


class Undoes(Callback):
    """Undoes at the end of a fit, or of one that fails, what it did at the start."""

    supports_stack = True
    open = 0

    def on_train_start(self, *args: Any) -> None:
        Undoes.open += 1

    def on_train_end(self, *args: Any) -> None:
        Undoes.open -= 1

    on_exception = on_train_end


def test_callbacks_of_a_stack_that_fails_are_told(stacks: list[int]) -> None:
    class ReadsNumbers(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * (2.0 if batch_idx and float(loss.detach()) < 0 else 1.0)

    model = ReadsNumbers(MLP(hidden=(8,)), partial(SGD, lr=0.1))
    run(FedAvg(objective=Given(lambda _: [Undoes()])), 1, model=model, engine=Vectorized())
    assert not stacks and Undoes.open == 0


@pytest.mark.long
def test_a_term_that_compares_features_trains_with_sample_privacy() -> None:
    pytest.importorskip("opacus", reason="needs Opacus: pip install 'flsuite[privacy]'")
    from flsuite.callbacks import DPSGD

    made = [
        run(
            of(Near, head="head."), 1, callbacks=[DPSGD()],
            model=Classifier(MLP(hidden=(8,)), partial(SGD, lr=0.1)), engine=engine,
        )
        for engine in (InProcess(), Vectorized())
    ]  # fmt: skip
    assert not made[0].federation.log.failures and distance(*made) < 1e-5


class Mixes(FeatureTerm):
    """Depends on the mean over a batch, and is zero for one sample."""

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return 1e4 + (features - features.mean(0)).square().mean()


class Compares(FeatureTerm):
    """The same by what it compares."""

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        features = features_of({})
        return [features - features.mean(0)]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features * others[0]).sum(1).mean()


def test_a_term_that_mixes_samples_is_told_from_one_that_is_a_mean() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))

    def check(kind: type[FeatureTerm], batch: Tensor = x) -> None:
        refuse_mixed_samples(kind(), lambda weights, batch=batch: batch, batch, {})

    for kind in (Mixes, Compares):
        check(kind, x[:1])  # one sample shows nothing
        with pytest.raises(FlsuiteError, match=f"{kind.__name__} has a term that is no mean"):
            check(kind)
    check(Squares)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "engine"), [(Mixes, InProcess()), (Compares, Vectorized())])
def test_with_sample_privacy_a_term_that_mixes_samples_is_refused(
    kind: type[FeatureTerm], engine: Any
) -> None:
    pytest.importorskip("opacus", reason="needs Opacus: pip install 'flsuite[privacy]'")
    from flsuite.callbacks import DPSGD

    model = Classifier(MLP(hidden=(8,)), partial(SGD, lr=0.1))
    with pytest.raises(FlsuiteError, match=f"DPSGD: {kind.__name__} has a term that is no mean"):
        run(FedAvg(objective=kind()), 1, callbacks=[DPSGD()], model=model, engine=engine)
