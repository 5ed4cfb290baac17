"""One client of a stack, and the Trainer and model that its callbacks see."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from flsuite.aggregators.objectives.base import StatedCallback
from flsuite.common.messages import ClientContext
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.trainer import ClientTrainer

_Kind = TypeVar("_Kind", bound=Callback)
_OF_A_LOOP = {"fit_loop", "callback_metrics", "logged_metrics", "progress_bar_metrics", "_results"}


@dataclass
class Member:
    """One client of a stack.

    Attributes:
        client: Its view of the round.
        loader: Its batches.
        epochs: Epochs of its fit.
        callbacks: What its algorithm does in its steps. All clients of a stack have the same kinds.
        module: A model whose parameters are this client's part of the stack, for the callbacks.
        optimizer: The model's optimizer over them, for the callbacks. It takes no step.
        trainer: The Trainer that its callbacks see.
        measures: Whether its algorithm measures the trained model.
        has_ended: Whether its fit has ended.
    """

    client: ClientContext
    loader: TrainLoader
    epochs: int
    callbacks: list[Callback]
    measures: bool
    module: LightningModule = field(init=False)
    optimizer: Optimizer = field(init=False)
    trainer: Any = field(init=False)
    has_ended: bool = False

    @property
    def steps(self) -> int:
        """Return the number of steps of the fit."""
        return self.epochs * len(self.loader)


class TrainerOfOne:
    """The Trainer of the worker, with what differs between clients: counters, batches, callbacks.

    Raises:
        RuntimeError: If something else is read that differs between them.
    """

    def __init__(self, trainer: ClientTrainer, member: Member) -> None:
        self._trainer = trainer
        self.optimizers, self.train_dataloader = [member.optimizer], member.loader
        self.callbacks = member.callbacks
        self.num_training_batches = len(member.loader)
        self.estimated_stepping_batches = member.steps
        self.should_stop, self.training = False, True
        self.move_to(0)

    def move_to(self, step: int) -> None:
        """Set the counters as they are before a step of the fit, counted from 0."""
        self.global_step = step
        self.current_epoch, batch = divmod(step, self.num_training_batches)
        # At the end of the fit, it is still the last one.
        is_end = step == self.estimated_stepping_batches
        self.is_last_batch = is_end or batch + 1 == self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_LOOP:
            what = "logs" if name == "_results" else f"reads trainer.{name}"
            raise RuntimeError(f"a callback {what}, which differs between clients")
        return getattr(self._trainer, name)


def callbacks_of(members: Sequence[Member], kind: type[_Kind]) -> list[_Kind]:
    """Return each client's callback of a kind, or none."""
    return [c for member in members for c in member.callbacks if isinstance(c, kind)]


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors along a new first axis, without a copy if they are all the same tensor."""
    is_same = all(part is parts[0] for part in parts)
    if is_same:
        return laid_out(parts[0]).expand(len(parts), *parts[0].shape)
    return laid_out(torch.stack(list(parts)))


def laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor in a layout that torch can normalize in groups under vmap."""
    return tensor if torch.__version__ >= TorchVersion("2.14") else tensor.contiguous()


def stated(members: Sequence[Member], kind: type[StatedCallback]) -> Any:
    """Return the objective that states what the clients' callbacks of a kind do, or ``None``.

    Raises:
        RuntimeError: If there are several, whose attributes may differ.
    """
    objectives = [one.objective for one in callbacks_of(members, kind)]
    if any(one is not objectives[0] for one in objectives):
        name = type(objectives[0]).__name__
        raise RuntimeError(f"each client has a {name} of its own, and a stack needs one for all")
    return objectives[0] if objectives else None
