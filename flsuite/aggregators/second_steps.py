"""Steps of a second model in a client's fit, stated for one client and taken for one or many."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.second_model import SecondModel
from flsuite.messages import ClientContext
from flsuite.state import State


class Second(Protocol):
    """A second model, or those of a stack of clients with their tensors along a first axis."""

    @property
    def parameters(self) -> State:
        """Return the trainable tensors."""

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one client's tensors as a function of these."""

    def gradient(self, batch: Any, index: int, at: State) -> State:
        """Return the gradient of the loss on a batch, at these values of the parameters."""

    def step(self, gradient: State) -> None:
        """Take one step of the optimizers."""


class SecondSteps(Callback, ABC):
    """Trains a second model on each batch, before the model's own step.

    Subclasses state a step in functions of one client's tensors. In a stack of clients, one
    callback takes the steps of all, so these functions must not look at numbers.

    Args:
        client: The client's view of the round.

    Attributes:
        held: What the steps read and change besides weights. See :meth:`start`.
    """

    supports_stack = True

    def __init__(self, client: ClientContext) -> None:
        self.client = client
        self.held: State = {}

    @abstractmethod
    def start(self, module: LightningModule) -> tuple[State, State]:
        """Return the second model's initial weights, and what else the steps hold, by name.

        Args:
            module: The model at the start of the fit.
        """

    def point(self, v: State, w: State, held: State) -> State:
        """Return the weights at which the loss is computed. Default: the second model's.

        Args:
            v: Parameters of the second model.
            w: Those of the model, of the same names.
            held: What the steps hold.
        """
        return v

    @abstractmethod
    def direction(self, gradient: State, v: State, w: State, held: State) -> tuple[State, State]:
        """Return the gradient to step with, and what the steps hold from then on.

        Args:
            gradient: Gradient of the loss at :meth:`point`.
            v: Parameters of the second model.
            w: Those of the model.
            held: What the steps hold.
        """

    def model_gradient(self, gradient: Tensor, w: Tensor, v: Tensor) -> Tensor:
        """Return the gradient of the model's own step, elementwise. Default: it does not change.

        Args:
            gradient: Gradient of one of its parameters.
            w: The parameter.
            v: The parameter of the second model, after its steps on this batch.
        """
        return gradient

    @abstractmethod
    def end(self, weights: State, held: State) -> None:
        """Keep what the client has at the end of its fit, in its memory.

        Args:
            weights: Entries of the second model, on the CPU.
            held: What the steps hold.
        """

    def take_steps(self, second: Second, w: State, batch: Any, index: int) -> None:
        """Take the steps on one batch. Default: one, of the model's kind of optimizer.

        Args:
            second: The second model.
            w: Parameters of the model, of the same names.
            batch: The batch, as the second model reads it.
            index: Its number in the epoch.
        """
        v = {name: value.detach() for name, value in second.parameters.items()}
        gradient = second.gradient(batch, index, second.each(self.point)(v, w, self.held))
        direction, self.held = second.each(self.direction)(gradient, v, w, self.held)
        second.step(direction)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer = trainer
        weights, self.held = self.start(pl_module)
        self.second = SecondModel(trainer, pl_module, weights)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        own = dict(pl_module.named_parameters())
        w = {name: own[name].detach() for name in self.second.parameters}
        self.take_steps(self.second, w, batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        v = self.second.parameters
        for name, p in pl_module.named_parameters():
            if p.grad is not None and name in v and id(p) in stepping:
                p.grad = self.model_gradient(p.grad, p.detach(), v[name].detach())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end(self.second.state(), self.held)
