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
from flsuite.aggregators.objectives.feature_term import refuse_mixed_samples
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.state import State
from flsuite.data import IID
from flsuite.federation import InProcess, Vectorized
from flsuite.models import MLP, Backbone, Classifier
from tests.aggregators.federations import (
    assert_same_tree,
    models_of,
    reference,
    run,
    table_data,
    table_model,
)
from tests.conftest import equal_states
from tests.federation.engines.test_processes import Images
from tests.federation.engines.test_vectorized import InDouble, close, distance, fitted

HEAD = "network.3."


class Scaled(FeatureTerm):
    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        return w, {"shift": torch.arange(float(len(client.class_counts)))}

    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Tensor:
        return outputs * 2 + held["shift"]


class Squares(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return 0.3 * features.square().mean()


class Near(FeatureTerm):
    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        return w, w

    def compared(self, features_of: Any, held: Any) -> list[Tensor]:
        return [features_of(held)]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return (features - others[0]).square().mean()


class WithoutGradient(FeatureTerm):
    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        return torch.ones(())


@dataclass(frozen=True, kw_only=True)
class Both(FeatureTerm):
    """The term of one objective, and the gradient of another."""

    own: FeatureTerm
    other: Objective

    @property
    def batches_per_step(self) -> int:  # type: ignore[override]
        return self.other.batches_per_step

    def start(self, client: ClientContext, w: State) -> tuple[State, Any]:
        w, held = self.other.start(client, w)
        return w, {"own": self.own.start(client, w)[1], "other": held}

    def gradient(self, oracle: Oracle, w: State, held: Any, batch: Any) -> tuple[State, Any]:
        g, other = self.other.gradient(oracle, w, held["other"], batch)
        return g, {"own": held["own"], "other": other}

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        term = self.own.term(features, others, batch, held["own"])
        return features.new_zeros(()) if term is None else term

    def logits(self, outputs: Tensor, batch: Any, held: Any) -> Tensor:
        return self.own.logits(outputs, batch, held["own"])

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        self.other.end(client, w, held["other"])

    def own_entries(self, *args: Any) -> State:
        return self.other.own_entries(*args)


def of(kind: type[FeatureTerm], head: str = HEAD) -> Aggregator:
    return FedAvg(objective=kind(head))


IN_DOUBLE = Classifier(InDouble(), partial(SGD, lr=0.01))
DOUBLE: dict[str, Any] = {"model": IN_DOUBLE, "rounds": 1, "max_epochs": 1}


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (Scaled, FedAvg()),
        (Squares, Ditto(lam=0.5)),
        (Scaled, PerFedAvg(0.05)),
        (Squares, PerFedAvg(0.05, "hessian_free", delta=0.1)),
    ],
)
def test_it_changes_the_models_own_loss_alone(
    kind: type[FeatureTerm], other: Aggregator, stacks: list[int]
) -> None:
    """The second model of Ditto has no term, and in the first round nothing else of the first."""
    head = "network.5."
    aggregator = FedAvg(objective=Both(head, own=kind(head), other=other.objective))
    settings = {
        "data": Images(clients=5, partition=IID(), batch_size=16, val_fraction=0.0)
    } | DOUBLE
    close(stacks, 1e-12, aggregator, **settings)
    changed, plain = (fitted(InProcess(), one, **settings) for one in (aggregator, other))
    assert not equal_states(changed.federation.state, plain.federation.state)
    if isinstance(other, Ditto):
        assert_same_tree(models_of(changed), models_of(plain))


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


@pytest.mark.long
def test_with_sample_privacy_only_a_term_may_see_samples() -> None:
    pytest.importorskip("opacus", reason="needs Opacus: pip install 'flsuite[privacy]'")
    from flsuite.callbacks import DPSGD

    with pytest.raises(FlsuiteError, match=r"DPSGD: Scaled\.logits sees samples"):
        run(of(Scaled), 1, callbacks=[DPSGD()], model=Classifier(MLP(hidden=(8,))))


class Undoes(Callback):
    """Undoes at the end of a fit, or of one that fails, what it did at the start."""

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
    run(FedAvg(), 1, model=model, engine=Vectorized(), callbacks=[Undoes()])
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
