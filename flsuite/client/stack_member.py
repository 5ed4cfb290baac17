"""One client of a stack, and the Trainer and model that its callbacks see."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer

from flsuite.client.stackable import OF_ALL
from flsuite.client.trainer import ClientTrainer
from flsuite.data.loader import TrainLoader
from flsuite.messages import ClientContext

Kind = TypeVar("Kind", bound=Callback)


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
        has_ended: Whether its fit has ended.
    """

    client: ClientContext
    loader: TrainLoader
    epochs: int
    callbacks: list[Callback]
    module: LightningModule = field(init=False)
    optimizer: Optimizer = field(init=False)
    trainer: Any = field(init=False)
    has_ended: bool = False

    @property
    def steps(self) -> int:
        """Return the number of steps of the fit."""
        return self.epochs * len(self.loader)


class TrainerOfOne:
    """The Trainer of the worker, with one client's optimizer and batches."""

    def __init__(self, trainer: ClientTrainer, optimizer: Optimizer, loader: TrainLoader) -> None:
        self._trainer = trainer
        self.optimizers, self.train_dataloader = [optimizer], loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def callbacks_of(members: Sequence[Member], kind: type[Kind]) -> list[Kind]:
    """Return each client's callback of a kind, or none."""
    return [c for member in members for c in member.callbacks if isinstance(c, kind)]


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors along a new first axis, without a copy if they are all the same tensor."""
    is_same = all(part is parts[0] for part in parts)
    return parts[0].expand(len(parts), *parts[0].shape) if is_same else torch.stack(list(parts))


def acting_for_all(members: Sequence[Member]) -> list[Callback]:
    """Return the callbacks of which one takes the steps of all clients, after they have started.

    Raises:
        RuntimeError: If those of other clients have other numbers.
    """
    acting: list[Callback] = []
    for kind in OF_ALL:
        alike = callbacks_of(members, kind)
        if not all(_have_equal_numbers(alike[0], other) for other in alike[1:]):
            raise RuntimeError(
                f"a {kind.__name__} has numbers that differ between clients; return them in start"
            )
        acting += alike[:1]
    return acting


def _have_equal_numbers(one: Callback, other: Callback) -> bool:
    a, b = (
        {k: v for k, v in vars(c).items() if isinstance(v, (bool, int, float, str, Tensor))}
        for c in (one, other)
    )
    return a.keys() == b.keys() and all(
        torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k]))
        if isinstance(a[k], Tensor)
        else a[k] == b[k]
        for k in a
    )


class _Hidden:
    """Refuses a step of all clients that reads one of them."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"a step of all clients reads {name} of one; return it in start")


@contextmanager
def without_clients(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Hide the clients that callbacks hold, whose numbers would count for all."""
    kept = [
        {name: value for name, value in vars(one).items() if isinstance(value, ClientContext)}
        for one in callbacks
    ]
    try:
        for one, clients in zip(callbacks, kept, strict=True):
            vars(one).update(dict.fromkeys(clients, _Hidden()))
        yield
    finally:
        for one, clients in zip(callbacks, kept, strict=True):
            vars(one).update(clients)
