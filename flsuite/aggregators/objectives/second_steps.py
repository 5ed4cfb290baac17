"""Objectives that train a second model next to a client's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.objectives.base import (
    Objective,
    StatedCallback,
    no_change_in_place,
    own_tensors,
    require_tensors,
    wrong,
)
from flsuite.aggregators.optimizers import about_to_step
from flsuite.aggregators.second_model import SecondModel
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientContext
from flsuite.common.state import State


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
