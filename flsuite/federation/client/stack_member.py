"""One client of a stack, and the users' callbacks of all of them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from flsuite.federation.client.callbacks import SampleGradients
from flsuite.federation.client.conditions import by_sample
from flsuite.federation.client.fit import OneFit
from flsuite.federation.client.tensor_optimizer import TensorOptimizer
from flsuite.federation.client.trainer import ClientTrainer

_NORMALIZES_ANY_LAYOUT = torch.__version__ >= TorchVersion("2.14")


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
    """

    request: FitRequest
    client: ClientContext
    loader: TrainLoader
    epoch_steps: int
    steps: int
    start: State
    helds: Sequence[Any]
    fit: OneFit | None = None


class MemberCallbacks:
    """The users' callbacks of a stack: each client has its own copies.

    A model and a Trainer show one client at a time to them.

    Args:
        callbacks: The users' callbacks.
        members: The clients.
        model: The model.
        trainer: The Trainer of the worker.
        tensors: All tensors of the models, each ``(clients, ...)``.
        optimizer: The optimizer of the stack.

    Attributes:
        private: Each client's callback that computes gradients by sample, if any.
        ended: The places of clients whose fit has ended. An error is no longer theirs.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        members: Sequence[Member],
        model: LightningModule,
        trainer: ClientTrainer,
        tensors: Mapping[str, Tensor],
        optimizer: TensorOptimizer,
    ) -> None:
        self._members, self._trainer, self._tensors = members, trainer, tensors
        self._optimizer = optimizer
        self.private: list[SampleGradients] = []
        self._own: list[list[Callback]] = []
        for member in members:
            own = copy.deepcopy(list(member.request.broadcast.callbacks))
            for private in by_sample(own):
                private.begin(member.loader)
                self.private.append(private)
            self._own.append([one for one in own if not isinstance(one, SampleGradients)])
        # A copy, because its tensors become the ones of a client.
        self._model = copy.deepcopy(model) if any(self._own) else model
        self._named = dict(chain(self._model.named_parameters(), self._model.named_buffers()))
        self._trained = [(p, p.requires_grad) for p in self._model.parameters()]
        self.ended: set[int] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the fits, and tell the callbacks of clients that still train of an error."""
        try:
            for hook in ("on_fit_start", "on_train_start"):
                for place in range(len(self._members)):
                    self._call(place, hook, step=0)
            yield
        except Exception as error:
            for place in range(len(self._members)):
                if place not in self.ended:
                    self._call(place, "on_exception", error, step=0)
            raise

    def end(self, place: int) -> None:
        """Tell the callbacks of a client that its steps have ended."""
        self._call(place, "on_train_end", step=self._members[place].steps)

    def _call(self, place: int, hook: str, *args: Any, step: int) -> None:
        """Call a hook of a client's callbacks. Weights that it changes in place are the client's.

        Raises:
            RuntimeError: If a callback changes what clients of a stack share.
        """
        if not self._own[place]:
            return
        with self._showing(place, step):
            for callback in self._own[place]:
                getattr(callback, hook)(self._trainer, self._model, *args)

    @contextmanager
    def _showing(self, place: int, step: int) -> Iterator[None]:
        member, trainer, template = self._members[place], self._trainer, self._optimizer.template
        for name, own in self._named.items():
            own.data = self._tensors[name][place]
        template.state.clear()
        template.state.update(self._optimizer.states_of(place))
        options = _options(template.param_groups)
        before = trainer.strategy.lightning_module
        trainer.strategy.connect(self._model)
        trainer.strategy.optimizers = [template]
        trainer.callbacks = self._own[place]  # type: ignore[attr-defined]
        show_progress(trainer, member.loader, member.epoch_steps, step)
        self._model.trainer = trainer

        try:
            yield
        finally:
            trainer.strategy.connect(before)  # type: ignore[arg-type]  # perhaps none
        for name, own in self._named.items():
            if own.data_ptr() != self._tensors[name][place].data_ptr():
                raise RuntimeError(f"a callback gives {name} other memory; change it in place")
        if any(p.requires_grad != trains for p, trains in self._trained):
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
    return tensor if _NORMALIZES_ANY_LAYOUT else tensor.contiguous()
