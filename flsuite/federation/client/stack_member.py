"""One client of a stack, and the model and Trainer through which users' callbacks see it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.torch_version import TorchVersion

from flsuite.common.client import ClientContext
from flsuite.common.lightning_internals import show_progress
from flsuite.common.messages import FitRequest
from flsuite.common.state import State
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.fit import OneFit
from flsuite.federation.client.stacked_optimizer import StackedOptimizer
from flsuite.federation.client.trainer import ClientTrainer


@dataclass
class Member:
    """One client of a stack.

    Attributes:
        request: The request of its fit.
        client: Its view of the round.
        loader: Its batches.
        epoch_steps: Batches per epoch.
        steps: Steps of the fit.
        start: All tensors of its model at the start.
        helds: What the parts of the algorithm hold.
        fit: Its fit as the algorithm sees it, unless the algorithm does nothing in it.
        callbacks: The users' callbacks.
        has_ended: Whether its fit has ended.
    """

    request: FitRequest
    client: ClientContext
    loader: TrainLoader
    epoch_steps: int
    steps: int
    start: State
    helds: Sequence[Any]
    fit: OneFit | None = None
    callbacks: list[Callback] = field(default_factory=list)
    has_ended: bool = False


class MemberModel:
    """A model and a Trainer that show one client of a stack at a time to users' callbacks.

    Args:
        model: A copy of the model. Its tensors become the ones of the client.
        trainer: The Trainer of the worker.
        tensors: All tensors of the models, each ``(clients, ...)``.
        optimizer: The optimizer of the stack.
    """

    def __init__(
        self,
        model: LightningModule,
        trainer: ClientTrainer,
        tensors: Mapping[str, Tensor],
        optimizer: StackedOptimizer,
    ) -> None:
        self._model, self._trainer, self._tensors = model, trainer, tensors
        self._optimizer = optimizer
        self._named = dict(chain(model.named_parameters(), model.named_buffers()))
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]

    def call(self, member: Member, place: int, hook: str, *args: Any) -> None:
        """Call a hook of a client's callbacks. Weights that it changes in place are the client's.

        Raises:
            RuntimeError: If a callback changes what clients of a stack share.
        """
        if not member.callbacks:
            return
        with self._showing(member, place, member.steps if hook == "on_train_end" else 0):
            for callback in member.callbacks:
                getattr(callback, hook)(self._trainer, self._model, *args)

    @contextmanager
    def _showing(self, member: Member, place: int, step: int) -> Iterator[None]:
        trainer, template = self._trainer, self._optimizer.template
        for name, own in self._named.items():
            own.data = self._tensors[name][place]
        template.state.clear()
        template.state.update(self._optimizer.states_of(place))
        options = _options(template.param_groups)
        before = trainer.strategy.lightning_module
        trainer.strategy.connect(self._model)
        trainer.strategy.optimizers = [template]
        trainer.callbacks = member.callbacks  # type: ignore[attr-defined]
        show_progress(trainer, member.loader, member.epoch_steps, step)
        self._model.trainer = trainer

        try:
            yield
        finally:
            trainer.strategy.connect(before)  # type: ignore[arg-type]  # perhaps none
        for name, own in self._named.items():
            if own.data_ptr() != self._tensors[name][place].data_ptr():
                raise RuntimeError(f"a callback gives {name} other memory; change it in place")
        if any(p.requires_grad != trains for _, p, trains in self._trained):
            raise RuntimeError("a callback freezes parameters")
        if _options(template.param_groups) != options or trainer.should_stop:
            raise RuntimeError("a callback changes a client's optimizer, or stops its fit")
        self._optimizer.take(place, template.state)


def _options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of an optimizer, without its parameters."""
    return [{name: value for name, value in g.items() if name != "params"} for g in groups]


def stacked(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return tensors along a new first axis on a device.

    If they are all the same tensor, the device holds it once.
    """
    if all(part is parts[0] for part in parts):
        return laid_out(parts[0].to(device)).expand(len(parts), *parts[0].shape)
    return laid_out(torch.stack([part.to(device) for part in parts]))


def laid_out(tensor: Tensor) -> Tensor:
    """Return a tensor in a layout that torch can normalize in groups under vmap."""
    return tensor if torch.__version__ >= TorchVersion("2.14") else tensor.contiguous()
