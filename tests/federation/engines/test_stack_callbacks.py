"""A user's callback in a stack of clients does what it does in each client's own fit."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, Adam

from flsuite.aggregators import FedAvg, Objective
from flsuite.common.messages import ClientContext
from flsuite.federation import InProcess, Vectorized
from flsuite.models import MLP, Classifier
from tests.aggregators.federations import assert_same_models
from tests.federation.engines import test_vectorized
from tests.federation.engines.test_vectorized import (
    InDouble,
    close,
    fitted,
    images,
    table_data,
    table_model,
)

stacks = test_vectorized.stacks  # a fixture

FACTORS: list[Callable[[Any, Any], float]] = [
    lambda trainer, module: 1 + trainer.global_step,
    lambda trainer, module: 1 + trainer.current_epoch,
    lambda trainer, module: 2 if trainer.is_last_batch else 1,
    lambda trainer, module: trainer.num_training_batches / 3,
    lambda trainer, module: trainer.estimated_stepping_batches / 5,
    lambda trainer, module: 1 + 2 * module.global_step + 3 * module.current_epoch,
    lambda trainer, module: trainer.max_epochs,
]


class Scales(Callback):
    """Divides the gradients by a number that it reads of the Trainer."""

    supports_stack = True

    def __init__(self, factor: Callable[[Any, Any], float]) -> None:
        self.factor = factor

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = parameter.grad / self.factor(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.global_step == trainer.estimated_stepping_batches
        assert trainer.is_last_batch and trainer.training


class ByNumber(Objective):
    """Gives each client a :class:`Scales`."""

    def __init__(self, factor: Callable[[Any, Any], float]) -> None:
        self.factor = factor

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [Scales(self.factor)]


def test_the_trainer_counts_the_steps_of_one_client(stacks: list[int]) -> None:
    def product(trainer: Any, module: Any) -> float:
        return math.prod(factor(trainer, module) for factor in FACTORS)

    close(stacks, 1e-5, FedAvg(objective=ByNumber(product)), data=table_data(8))


def momenta(optimizer: Any) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values()]


class ReadsMomentum(Callback):
    """Shrinks the gradients by the momentum, which it halves where it is large."""

    supports_stack = True

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norm = 1 + sum(float(one.norm()) for one in momenta(optimizer))
        for parameter in pl_module.parameters():
            parameter.grad = parameter.grad / norm
        for one in momenta(optimizer):
            one.mul_(0.5 if float(one.norm()) > 0.1 else 1.0)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter, one in zip(
                pl_module.parameters(), momenta(trainer.optimizers[0]), strict=True
            ):
                parameter.add_(one, alpha=-0.1)


@pytest.mark.parametrize("keep", [False, True])
def test_the_optimizer_has_the_state_of_one_client(keep: bool, stacks: list[int]) -> None:
    settings: dict[str, Any] = {"callbacks": [ReadsMomentum()], "keep_optimizers": keep}
    close(stacks, 1e-5, FedAvg(), table_model(momentum=0.9), data=table_data(8), **settings)


class Remembers(Objective):
    """Keeps the momentum of each client, whose fit may end before others' fits."""

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_Remembers(client)]


class _Remembers(Callback):
    supports_stack = True

    def __init__(self, client: ClientContext) -> None:
        self.client = client

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.client.memory["momenta"] = dict(enumerate(momenta(trainer.optimizers[0])))


def test_what_a_client_keeps_of_its_momentum_is_its_own(stacks: list[int]) -> None:
    model = Classifier(InDouble(), partial(SGD, lr=0.1, momentum=0.9))
    runs = [
        fitted(engine, FedAvg(objective=Remembers()), model, images())
        for engine in (InProcess(), Vectorized(clients=4))
    ]
    assert stacks
    alone, stacked = ([made.federation.clients[k]["objective"] for k in range(6)] for made in runs)
    for one, other in zip(alone, stacked, strict=True):
        for key, value in one["momenta"].items():
            torch.testing.assert_close(other["momenta"][key], value)
            assert other["momenta"][key].untyped_storage().nbytes() == value.nbytes


class FailsOnce(Objective):
    """Raises an error where it makes the callbacks of one client."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged

    def callbacks(self, client: ClientContext) -> list[Callback]:
        if client.id == self.damaged:
            raise ValueError("this client is damaged")
        return []


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_client_without_callbacks_fails_alone(damaged: int, stacks: list[int]) -> None:
    close(stacks, 1e-5, FedAvg(objective=FailsOnce(damaged)), data=table_data(8))


class Acts(Callback):
    """Changes at one hook what a stack has for all clients."""

    supports_stack = True

    def __init__(self, hook: str, act: Callable[[Any, Any], None]) -> None:
        setattr(self, hook, lambda trainer, module, *_: act(trainer, module))

    def on_before_optimizer_step(self, *args: Any) -> None:
        return None


def new_rate(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 0.01


def new_memory(trainer: Any, module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def logs(trainer: Any, module: Any) -> None:
    module.log("norm", sum(float(p.detach().norm()) for p in module.parameters()))


def stops(trainer: Any, module: Any) -> None:
    trainer.should_stop = True


def forgets(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def restarts(trainer: Any, module: Any) -> None:
    for state in trainer.optimizers[0].state.values():
        state["momentum_buffer"] = None


def steps_back(trainer: Any, module: Any) -> None:
    for state in trainer.optimizers[0].state.values():
        state["step"].sub_(0.5)


def reads_the_loop(trainer: Any, module: Any) -> None:
    with torch.no_grad():
        next(module.parameters()).mul_(0.9 ** (1 + trainer.fit_loop.epoch_loop.batch_idx))


@pytest.mark.parametrize(
    ("hook", "act"),
    [
        ("on_train_start", new_rate),
        ("on_before_optimizer_step", new_rate),
        ("on_train_start", new_memory),
        ("on_before_optimizer_step", new_memory),
        ("on_train_end", new_memory),
        ("on_before_optimizer_step", logs),
        ("on_before_optimizer_step", stops),
        ("on_before_optimizer_step", forgets),
        ("on_before_optimizer_step", restarts),
        ("on_before_optimizer_step", steps_back),
        ("on_before_optimizer_step", reads_the_loop),
    ],
)
def test_what_differs_between_clients_trains_them_by_themselves(
    hook: str, act: Callable[[Any, Any], None], stacks: list[int]
) -> None:
    settings: dict[str, Any] = {"callbacks": [Acts(hook, act)], "rounds": 1}
    optimizer: Any = Adam if act is steps_back else partial(SGD, momentum=0.9)
    settings["model"] = Classifier(MLP((4,)), partial(optimizer, lr=0.05))
    alone, stacked = (fitted(engine, **settings) for engine in (InProcess(), Vectorized()))
    assert not stacks
    assert_same_models(alone, stacked)
