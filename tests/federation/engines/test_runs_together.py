"""Runs that differ in the seed train in one stack, and each is what it is alone."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adam

from flsuite import FederatedTrainer, FlsuiteError
from flsuite.aggregators import MOON, SCAFFOLD, Ditto, FedAvg, FedBuff, FedRep
from flsuite.common.turns import Turns
from flsuite.federation import Asynchronous, Stragglers, Vectorized
from flsuite.federation.client.stack import Stack
from flsuite.models import MLP, Backbone, Classifier
from tests.aggregators.federations import (
    Quadratic,
    Quadratics,
    federation,
    models_of,
    run,
    table_data,
    table_model,
)

SEEDS = (3, 4, 5)


class Dropping(Backbone):
    """A network with dropout."""

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], 8), nn.Dropout(0.5), nn.Linear(8, outputs))


class Scaling(Callback):
    """Scales a weight at the end of a fit."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        next(iter(pl_module.parameters())).data.mul_(0.9)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "a mean": lambda: {"aggregator": FedAvg()},
    "control variates": lambda: {"aggregator": SCAFFOLD()},
    "a term of the features": lambda: {"aggregator": MOON(), "model": Classifier(MLP((8,)))},
    "a second model": lambda: {"aggregator": Ditto()},
    "epochs of some layers": lambda: {"aggregator": FedRep(), "max_epochs": 2},
    "optimizers that continue": lambda: {
        "aggregator": FedAvg(),
        "keep_optimizers": True,
        "model": Classifier(MLP((8,)), optimizer=partial(Adam, lr=0.01)),
    },
    "samples of its own": lambda: {"aggregator": FedAvg(), "server_samples": 20},
    "an asynchronous schedule": lambda: {
        "aggregator": FedBuff(),
        "schedule": Asynchronous(3, 2, speeds=Stragglers(per_fit=True)),
    },
    "callbacks": lambda: {"aggregator": FedAvg(), "callbacks": [Scaling()]},
}


def made(seed: int, case: dict[str, Any], rounds: int = 3) -> FederatedTrainer:
    """Return a finished run of a case."""
    case, data = dict(case), table_data()
    data.server_samples = case.pop("server_samples", 0)
    model = copy.deepcopy(case.pop("model", None)) or table_model()
    own = {"seed": seed, "engine": Vectorized(), "adapt_epochs": 1, **case}
    return run(own.pop("aggregator"), rounds, data, model=model, **own)


def side_by_side(calls: Sequence[Callable[[], FederatedTrainer]]) -> list[FederatedTrainer]:
    """Let runs take turns, and return their trainers."""
    results: dict[int, FederatedTrainer] = {}

    def keep(place: int) -> None:
        results[place] = calls[place]()

    Turns([partial(keep, place) for place in range(len(calls))], lambda place: None).take()
    return [results[place] for place in range(len(calls))]


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Return the runs of each stack that trains, by the number of their setup."""
    seen: list[set[int]] = []
    train = Stack.train

    def counted(self: Stack, members: Any, *args: Any) -> Any:
        seen.append({id(member.loader.data.train.rows) for member in members})
        return train(self, members, *args)

    monkeypatch.setattr(Stack, "train", counted)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_a_run_together_is_the_run_alone(case: str, stacks: list[set[int]]) -> None:
    ours = side_by_side([partial(made, seed, CASES[case]()) for seed in SEEDS])
    assert max(map(len, stacks)) == len(SEEDS), "they have not shared a stack"
    for seed, one in zip(SEEDS, ours, strict=True):
        alone = made(seed, CASES[case]())
        assert one.round == alone.round
        assert_close(models_of(one), models_of(alone))
        assert_close(one.federation.server.memory, alone.federation.server.memory)  # type: ignore[union-attr]
        assert one.callback_metrics.keys() == alone.callback_metrics.keys()


def assert_close(ours: Any, theirs: Any) -> None:
    """Compare nested data, tensors within 1e-5 of their norm."""
    leaves, structure = torch.utils._pytree.tree_flatten(ours)
    others, other = torch.utils._pytree.tree_flatten(theirs)
    assert structure == other
    for a, b in zip(leaves, others, strict=True):
        if not isinstance(a, Tensor):
            assert a == b
        else:
            a, b = a.double(), b.double()
            assert (a - b).norm() <= 1e-5 * b.norm().clamp(min=1e-3)


def test_one_run_that_takes_turns_is_the_run_alone_bit_for_bit() -> None:
    case = CASES["control variates"]
    (one,) = side_by_side([partial(made, 3, case())])
    alone = made(3, case())
    for ours, theirs in zip(models_of(one), models_of(alone), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_runs_in_other_rounds_and_a_run_that_fails_share_what_they_can(
    stacks: list[set[int]],
) -> None:
    def fails() -> FederatedTrainer:
        with pytest.raises(ZeroDivisionError):
            made(4, {"aggregator": FedAvg(), "callbacks": [Ending()]})
        return made(5, {"aggregator": FedAvg()}, rounds=1)

    ours, _ = side_by_side([partial(made, 3, CASES["a mean"]()), fails])
    # The third round of one run does not train with the adaptation of the other.
    assert [len(one) for one in stacks] == [2, 2, 1, 1, 1]
    assert_close(models_of(ours), models_of(made(3, CASES["a mean"]())))


class Ending(Callback):
    """Ends the run in its second round."""

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        if round == 2:
            raise ZeroDivisionError


def test_a_client_that_fails_in_a_stack_of_several_runs_is_its_own_runs_fault() -> None:
    def fit(curvature: float) -> FederatedTrainer:
        trainer = federation(FedAvg(), 2, engine=Vectorized(), evaluate_every=1)
        trainer.fit(Quadratic(), Quadratics((1.0, 2.0, curvature), (0.0, 1.0, 3.0)))
        return trainer

    ours, failing = side_by_side([partial(fit, 3.0), partial(fit, -1.0)])
    assert_close(models_of(ours), models_of(fit(3.0)))
    assert_close(models_of(failing), models_of(fit(-1.0)))
    (failure,) = failing.federation.log.failures  # type: ignore[union-attr]
    assert failure.client == 2 and "no minimum" in failure.reason
    assert not ours.federation.log.failures  # type: ignore[union-attr]


class Interrupted(Callback):
    """Is interrupted in Lightning's own loop."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_in_the_fit_of_a_client_ends_the_run_and_is_no_fault_of_the_client() -> None:
    def interrupted() -> FederatedTrainer:
        trainer = federation(FedAvg(), 1, engine=Vectorized(), callbacks=[Interrupted()])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(table_model(), table_data())
        return trainer

    for one in side_by_side([interrupted, interrupted]):
        assert one.round == 0 and not one.federation.log.failures  # type: ignore[union-attr]


class Drawn(Classifier):
    """A model that draws what its state dict leaves out."""

    as_buffer: ClassVar[bool]

    def build(self, spec: Any) -> None:
        super().build(spec)
        if self.as_buffer:
            self.register_buffer("drawn", 1 + torch.rand(spec.shape), persistent=False)
        else:
            self.drawn = 1 + float(torch.rand(()))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.drawn)


@pytest.mark.parametrize("as_buffer", [True, False])
def test_a_model_keeps_what_it_has_drawn_outside_its_state_dict(
    as_buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawn, "as_buffer", as_buffer, raising=False)

    def fit(seed: int) -> FederatedTrainer:
        torch.manual_seed(seed)
        return made(seed, {"aggregator": FedAvg(), "model": Drawn(MLP((8,)))})

    for seed, one in zip(SEEDS, side_by_side([partial(fit, s) for s in SEEDS]), strict=True):
        assert_close(models_of(one), models_of(fit(seed)))


def test_a_step_with_random_numbers_is_refused_in_every_run() -> None:
    lines = []

    def refused(seed: int) -> FederatedTrainer:
        model = Classifier(Dropping(), optimizer=partial(SGD, lr=0.1))
        trainer = federation(FedAvg(), 2, seed=seed, engine=Vectorized())
        with pytest.raises(FlsuiteError, match="Classifier draws random numbers") as caught:
            trainer.fit(model, table_data())
        lines.append(str(caught.value))
        assert trainer.round == 0
        return trainer

    side_by_side([partial(refused, seed) for seed in SEEDS])
    assert len(lines) == 3 and "leave together out of the sweep" in lines[0]
