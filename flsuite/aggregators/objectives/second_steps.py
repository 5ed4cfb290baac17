"""Objectives that train a second model next to a client's own, in the same fit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from flsuite.aggregators.losses import loss_and_gradient
from flsuite.aggregators.objectives.base import (
    Objective,
    StatedCallback,
    no_change_in_place,
    own_tensors,
    require_tensors,
    wrong,
)
from flsuite.aggregators.optimizers import about_to_step, optimizer_for
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, clone
from flsuite.models.layers import entry_names


class SecondModel:
    """Weights that a client trains next to its model's, with a copy of the model's optimizers.

    The optimizers start anew in every fit, also with ``trainer.keep_optimizers``.

    Args:
        trainer: The Trainer of the fit, which has started.
        module: The model.
        start: Initial weights: entries of the model's state dict.

    Attributes:
        parameters: The trainable ones, on the model's device.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, start: State) -> None:
        self.trainer, self.module = trainer, module
        own = module.state_dict()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        copies = {name: torch.empty_like(own[name]).copy_(value) for name, value in start.items()}
        self.parameters = {
            name: copies.pop(name).requires_grad_() for name in trained if name in copies
        }
        self._buffers = copies
        replaced = {id(trained[name]): value for name, value in self.parameters.items()}
        self._optimizers = [optimizer_for(one, replaced) for one in trainer.optimizers]

    @property
    def rate(self) -> float:
        """Return the learning rate of the model's first optimizer."""
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function unchanged: these are the tensors of one client."""
        return function

    def gradient(self, batch: Any, index: int, at: Mapping[str, Tensor] | None = None) -> State:
        """Return the gradient of the loss on a batch, see :meth:`loss_and_gradient`."""
        return self.loss_and_gradient(batch, index, at)[1]

    def loss_and_gradient(
        self, batch: Any, index: int, at: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """Return the loss on a batch, and its gradient.

        Args:
            batch: A batch on the model's device.
            index: Its number in the epoch.
            at: Other values of the parameters. Default: their own.
        """
        weights = self.parameters if at is None else at
        own = {name: weights[name] for name in self.parameters}
        return loss_and_gradient(self.trainer, self.module, own, batch, index, self._buffers)

    def step(self, gradient: State) -> None:
        """Take one step of the optimizers, with the present settings of the model's own.

        The Trainer's clipping applies, but not hooks of the model.
        """
        for name, parameter in self.parameters.items():
            parameter.grad = gradient.get(name)
        self._clip([p for p in self.parameters.values() if p.grad is not None])
        for own, others in zip(self._optimizers, self.trainer.optimizers, strict=True):
            for group, other in zip(own.param_groups, others.param_groups, strict=True):
                # Schedulers change the rate, and some the momentum.
                group.update({key: value for key, value in other.items() if key != "params"})
            own.step()

    def state(self) -> State:
        """Return a CPU snapshot of the weights."""
        return clone({**self.parameters, **self._buffers})

    def _clip(self, parameters: list[Tensor]) -> None:
        if not (limit := self.trainer.gradient_clip_val):
            return
        by_value = self.trainer.gradient_clip_algorithm == "value"
        (clip_grad_value_ if by_value else clip_grad_norm_)(parameters, float(limit))


def start_of(client: ClientContext, module: LightningModule, kept: State | None) -> State:
    """Return the initial weights of a second model: the weights of the last fit, if any.

    Buffers that stay with the client are the second model's own. Buffers that the fit has reset
    stay reset.

    Args:
        client: The client's view of the round.
        module: The model at the start of the fit.
        kept: What :meth:`SecondModel.state` returned in the client's last fit.
    """
    own, parameters = module.state_dict(), dict(module.named_parameters())
    buffers = {name: own[name] for name in entry_names(module) if name not in parameters}
    reset = {name: own[name] for name in client.layout.reset}
    return {**buffers, **(kept or client.global_state), **reset}


def pulled(gradient: State, pull: State, weight: float) -> State:
    """Return ``gradient + weight pull``. An entry without a gradient is pulled alone."""
    return {
        name: gradient[name].add(own, alpha=weight) if name in gradient else weight * own
        for name, own in pull.items()
    }


def at_least_two(batch: Any) -> Any:
    """Return a batch of one sample as two of them, because BatchNorm cannot train on one."""
    if extract_batch_size(batch) > 1:
        return batch
    return apply_to_collection(batch, Tensor, lambda part: torch.cat([part, part]))


class SecondSteps(Objective, ABC):
    """Trains a second model on each batch, before the model's own step.

    Subclasses state a step in functions of one client's tensors, which must not look at numbers or
    change tensors in place. A stack of clients takes the steps of all at once. What differs between
    clients is what :meth:`start` returns.

    Attributes:
        steps: Steps on each batch.
        personal_lr: Learning rate of plain gradient descent. Default: the model's optimizer steps.
    """

    steps: int = 1
    personal_lr: float | None = None

    @abstractmethod
    def start(self, client: ClientContext, module: LightningModule) -> tuple[State, State]:
        """Return a second model's initial weights, and what else its steps hold, by name.

        Args:
            client: The client's view of the round.
            module: Its model at the start of the fit.
        """

    def point(self, v: State, w: State, held: State) -> State:
        """Return the weights at which the loss is computed. Default: the second model's.

        Args:
            v: Parameters of the second model.
            w: Parameters of the model, of the same names.
            held: What the steps hold.
        """
        return v

    @abstractmethod
    def direction(
        self, gradient: State, v: State, w: State, held: State, rate: float
    ) -> tuple[State, State]:
        """Return the gradient to step with, and what the steps hold from then on.

        Args:
            gradient: Gradient of the loss at :meth:`point`.
            v: Parameters of the second model.
            w: Parameters of the model.
            held: What the steps hold.
            rate: Learning rate of the model.
        """

    def model_gradient(self, gradient: Tensor, w: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of the model's own step. Default: it does not change.

        Args:
            gradient: Gradient of one of its parameters.
            w: The parameter.
            v: The parameter of the second model, after its steps on this batch.
        """
        return gradient

    @abstractmethod
    def end(self, client: ClientContext, weights: State, held: State) -> None:
        """Keep what a client has at the end of its fit, in its memory.

        Args:
            client: The client's view of the round.
            weights: Entries of the second model, on the CPU.
            held: What the steps hold.
        """

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [SecondCallback(client, self), *super().callbacks(client)]


class Second(Protocol):
    """A second model, or a stack of them, with the clients along the first axis of each tensor."""

    @property
    def parameters(self) -> State:
        """Return the trainable tensors."""

    @property
    def rate(self) -> float:
        """Return the learning rate of the model's first optimizer."""

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one client's tensors as a function of these."""

    def gradient(self, batch: Any, index: int, at: State) -> State:
        """Return the gradient of the loss on a batch, at these values of the parameters."""

    def step(self, gradient: State) -> None:
        """Take one step of the optimizers."""


def take_steps(
    objective: SecondSteps, second: Second, w: State, batch: Any, index: int, held: State
) -> State:
    """Take the steps on one batch, and return what they hold from then on.

    Args:
        objective: States the steps.
        second: The second model.
        w: Parameters of the model, of the same names.
        batch: The batch, as the second model reads it.
        index: Its number.
        held: What the steps hold.

    Raises:
        FlsuiteError: If the objective returns something else than entries of the second model.
    """

    def point(v: State, w: State, held: State) -> State:
        with no_change_in_place(objective, held):
            at: Any = objective.point(v, w, held)
        if not isinstance(at, Mapping) or at.keys() != v.keys():
            raise wrong(objective, "point", at, f"all entries of v: {', '.join(v)}")
        return dict(at)

    def direction(gradient: State, v: State, w: State, held: State) -> tuple[State, State]:
        with no_change_in_place(objective, held):
            own: Any = objective.direction(gradient, v, w, held, rate=second.rate)
        if not isinstance(own, tuple) or len(own) != 2 or not _is_part_of(own[0], v):
            wanted = f"a gradient of entries as in v ({', '.join(v)}), and what the steps hold"
            raise wrong(objective, "direction", own, wanted)
        require_tensors(objective, "direction", own[1])
        return own

    for _ in range(objective.steps):
        v = {name: value.detach() for name, value in second.parameters.items()}
        with no_change_in_place(objective, held):
            gradient = second.gradient(batch, index, second.each(point)(v, w, held))
            to_step, after = second.each(direction)(gradient, v, w, held)
        held = after
        if objective.personal_lr is None:
            second.step(to_step)
            continue
        for name, value in to_step.items():
            v[name].sub_(value, alpha=objective.personal_lr)
    return held


def _is_part_of(gradient: Any, v: State) -> bool:
    """Return whether a gradient has entries of the second model, of their shapes and dtypes."""
    return isinstance(gradient, Mapping) and all(
        name in v and (value.shape, value.dtype) == (v[name].shape, v[name].dtype)
        for name, value in gradient.items()
    )


def model_gradient(objective: SecondSteps, gradient: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Return the gradient of the model's own step, see :meth:`SecondSteps.model_gradient`.

    Raises:
        FlsuiteError: If the objective returns something else.
    """
    own: Any = objective.model_gradient(gradient, w, v)
    if not isinstance(own, Tensor) or own.shape != gradient.shape:
        raise wrong(objective, "model_gradient", own, "a tensor of the gradient's shape")
    return own


class SecondCallback(StatedCallback):
    """Takes the steps in a fit of one client."""

    objective: SecondSteps

    def begin(self, module: LightningModule) -> tuple[State, State]:
        """Return the second model's initial weights, and what else the steps hold."""
        with no_change_in_place(self.objective, self.client.global_state):
            started: Any = self.objective.start(self.client, module)
        if not isinstance(started, tuple) or len(started) != 2:
            raise wrong(self.objective, "start", started, "weights, and what else the steps hold")
        weights, held = own_tensors(self.objective, "start", started, module)
        if unknown := weights.keys() - module.state_dict().keys():
            raise FlsuiteError(
                f"{type(self.objective).__name__}.start returned weights of {min(unknown)}, which "
                "the model does not have; return entries of its state dict"
            )
        return weights, held

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise FlsuiteError(
                "this aggregator trains a second model batch by batch; leave out "
                "trainer.accumulate_grad_batches"
            )
        weights, self._held = self.begin(pl_module)
        self._second = SecondModel(trainer, pl_module, weights)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        own = dict(pl_module.named_parameters())
        w = {name: own[name].detach() for name in self._second.parameters}
        self._held = take_steps(self.objective, self._second, w, batch, batch_idx, self._held)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        v = self._second.parameters
        for name, p, gradient in about_to_step(optimizer, pl_module.named_parameters()):
            if name in v:
                p.grad = model_gradient(self.objective, gradient, p.detach(), v[name].detach())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.objective.end(self.client, self._second.state(), self._held)
