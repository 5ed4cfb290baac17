"""A user's callback in a stack of clients does what it does in each client's own fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from flsuite.aggregators import FedAvg
from flsuite.aggregators.objectives import Objective
from flsuite.engines import InProcess, Vectorized
from flsuite.messages import ClientContext
from tests.aggregators.federations import assert_same_models
from tests.engines import test_vectorized
from tests.engines.test_vectorized import close, fitted, table_data, table_model

stacks = test_vectorized.stacks  # a fixture

FACTORS: dict[str, Callable[[Any, Any], float]] = {
    "global_step": lambda trainer, module: 1 + trainer.global_step,
    "current_epoch": lambda trainer, module: 1 + trainer.current_epoch,
    "is_last_batch": lambda trainer, module: 2 if trainer.is_last_batch else 1,
    "num_training_batches": lambda trainer, module: trainer.num_training_batches,
    "estimated_stepping_batches": lambda trainer, module: trainer.estimated_stepping_batches,
    "of the module": lambda trainer, module: 1 + module.global_step + module.current_epoch,
    "max_epochs": lambda trainer, module: trainer.max_epochs,
}


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


@pytest.mark.parametrize("number", FACTORS)
def test_the_trainer_counts_the_steps_of_one_client(number: str, stacks: list[int]) -> None:
    close(stacks, 1e-5, FedAvg(objective=ByNumber(FACTORS[number])), data=table_data(8))


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
        ("on_before_optimizer_step", reads_the_loop),
    ],
)
def test_what_differs_between_clients_trains_them_by_themselves(
    hook: str, act: Callable[[Any, Any], None], stacks: list[int]
) -> None:
    settings: dict[str, Any] = {"callbacks": [Acts(hook, act)], "data": table_data(8)}
    settings["model"] = table_model(momentum=0.9)
    alone, stacked = (fitted(engine, **settings) for engine in (InProcess(), Vectorized()))
    assert not stacks
    assert_same_models(alone, stacked)
