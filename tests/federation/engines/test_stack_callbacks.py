"""A user's callback in a stack of clients does what it does in each client's own fit."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD

from flsuite.aggregators import FedAvg, Objective
from flsuite.common.messages import ClientContext
from flsuite.federation import InProcess, Vectorized
from flsuite.models import MLP, Classifier
from tests.aggregators.federations import assert_same_models
from tests.federation.engines.test_vectorized import close, fitted, images, table_data, table_model

FACTORS: list[Callable[[Any, Any], float]] = [
    lambda trainer, module: 1 + trainer.global_step / 9,
    lambda trainer, module: 1 + trainer.current_epoch,
    lambda trainer, module: 2 if trainer.is_last_batch else 1,
    lambda trainer, module: trainer.num_training_batches / 3,
    lambda trainer, module: trainer.estimated_stepping_batches / 5,
    lambda trainer, module: 1 + trainer.train_dataloader.client,
    lambda trainer, module: 1 + 2 * module.global_step + 3 * module.current_epoch,
    lambda trainer, module: trainer.max_epochs,
]


class Scales(Callback):
    """Scales the weights by numbers that it reads of the Trainer, at the start and at the end."""

    def _scale(self, trainer: Any, module: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1 / (1 + math.prod(one(trainer, module) for one in FACTORS)))

    on_train_start = on_train_end = _scale  # type: ignore[assignment]


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 2, "max_steps": 3}])
def test_the_trainer_counts_the_steps_of_one_client(
    limits: dict[str, int], stacks: list[int]
) -> None:
    model = Classifier(MLP((4,)), partial(SGD, lr=0.05))
    close(stacks, 1e-5, model=model, data=images(), callbacks=[Scales()], **limits)


def momenta(optimizer: Any) -> list[torch.Tensor]:
    return [state["momentum_buffer"] for state in optimizer.state.values()]


class ReadsMomentum(Callback):
    """Moves the weights along the momentum at the end, and halves it where it is large."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        own = momenta(trainer.optimizers[0])
        with torch.no_grad():
            for parameter, one in zip(pl_module.parameters(), own, strict=True):
                parameter.add_(one, alpha=-0.1)
                one.mul_(0.5 if float(one.norm()) > 0.1 else 1.0)


@pytest.mark.parametrize("keep", [False, True])
def test_the_optimizer_has_the_state_of_one_client(keep: bool, stacks: list[int]) -> None:
    settings: dict[str, Any] = {"callbacks": [ReadsMomentum()], "keep_optimizers": keep}
    close(stacks, 1e-5, FedAvg(), table_model(momentum=0.9), data=table_data(8), **settings)


class FailsOnce(Objective):
    """Raises an error where the fit of one client starts."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged

    def start(self, client: ClientContext, w: Any) -> Any:
        if client.id == self.damaged:
            raise ValueError("this client is damaged")
        return w, {}


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_client_that_cannot_start_fails_alone(damaged: int, stacks: list[int]) -> None:
    close(stacks, 1e-5, FedAvg(objective=FailsOnce(damaged)), data=table_data(8))


class Acts(Callback):
    """Changes at one hook what a stack has for all clients."""

    def __init__(self, hook: str, act: Callable[[Any, Any], None]) -> None:
        setattr(self, hook, lambda trainer, module, *_: act(trainer, module))


def new_rate(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] = 0.01


def new_memory(trainer: Any, module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def stops(trainer: Any, module: Any) -> None:
    trainer.should_stop = True


def forgets(trainer: Any, module: Any) -> None:
    trainer.optimizers[0].state.clear()


def restarts(trainer: Any, module: Any) -> None:
    for state in trainer.optimizers[0].state.values():
        state["momentum_buffer"] = None


@pytest.mark.parametrize(
    ("hook", "act"),
    [
        ("on_train_start", new_rate),
        ("on_train_start", new_memory),
        ("on_train_end", new_memory),
        ("on_train_start", stops),
        ("on_train_end", forgets),
        ("on_train_end", restarts),
        ("on_before_optimizer_step", new_rate),
        ("on_train_epoch_start", new_memory),
    ],
)
def test_what_differs_between_clients_trains_them_by_themselves(
    hook: str, act: Callable[[Any, Any], None], stacks: list[int]
) -> None:
    settings: dict[str, Any] = {"callbacks": [Acts(hook, act)], "rounds": 1}
    settings["model"] = Classifier(MLP((4,)), partial(SGD, momentum=0.9, lr=0.05))
    alone, stacked = (fitted(engine, **settings) for engine in (InProcess(), Vectorized()))
    assert not stacks
    assert_same_models(alone, stacked)
