"""The second models of a stack of clients, which train next to their models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flsuite.aggregators.second_model import first_names, optimizer_for
from flsuite.aggregators.second_steps import SecondSteps
from flsuite.client.stack_member import Member, callbacks_of, stacked
from flsuite.client.stacked_loss import Group, StackedLoss, clip, with_rows
from flsuite.state import State, clone


class StackedSecond:
    """The second models of a stack of clients, with one row per client.

    The first client's callback takes the steps of all.

    Args:
        members: The clients. Each has one callback that is a ``SecondSteps``.
        tensors: Tensors of their models, each ``(clients, ...)``, which the steps read.
        loss: Computes the losses.

    Attributes:
        parameters: The trainable tensors, each ``(clients, ...)``.
    """

    def __init__(
        self, members: Sequence[Member], tensors: Mapping[str, Tensor], loss: StackedLoss
    ) -> None:
        self._loss, self._tensors = loss, tensors
        self._callbacks = callbacks_of(members, SecondSteps)  # type: ignore[type-abstract]
        self._steps, first = self._callbacks[0], members[0]
        starts, helds = [], []
        for member, callback in zip(members, self._callbacks, strict=True):
            callback.trainer = member.trainer
            start, held = callback.start(member.module)
            starts.append(start)
            helds.append(held)
        self._steps.held = tree_map(lambda *parts: stacked(parts), *helds)

        self._names = first_names(first.module, starts[0])
        device = first.module.device
        copies = {
            name: stacked([start[entry] for start in starts]).to(device, copy=True).contiguous()
            for entry, name in self._names.items()
        }
        trained = {name: p for name, p in first.module.named_parameters() if p.requires_grad}
        self.parameters = {name: copies.pop(name) for name in trained if name in copies}
        self._others = copies
        replaced = {id(trained[name]): value for name, value in self.parameters.items()}
        self._optimizer = optimizer_for(first.optimizer, replaced)

    def take_steps(self, groups: Sequence[Group], index: int) -> None:
        """Take the steps of all clients on one batch each."""
        w = {name: self._tensors[name].detach() for name in self.parameters}
        self._steps.take_steps(self, w, groups, index)

    def change(self, gradients: State) -> None:
        """Change the gradients of the models' own steps, in place."""
        for name in gradients.keys() & self.parameters.keys():
            w, v = self._tensors[name].detach(), self.parameters[name].detach()
            gradients[name].copy_(self._steps.model_gradient(gradients[name], w, v))

    def end(self, place: int) -> None:
        """End the steps of one client."""
        own = clone({k: v[place] for k, v in {**self.parameters, **self._others}.items()})
        held = tree_map(lambda part: part[place], self._steps.held)
        self._callbacks[place].end({k: own[name] for k, name in self._names.items()}, held)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one client's tensors as a function of the stack's."""
        return torch.vmap(function)

    def gradient(self, batch: Sequence[Group], index: int, at: State) -> State:
        """Return the gradients of the losses, zero for clients without a batch.

        Args:
            batch: The batches of the clients.
            index: The step of the stack. A group knows the number of each of its batches.
            at: Values of the parameters.

        Raises:
            RuntimeError: If the losses do not all depend on the same parameters.
        """
        gradients: State = {}
        for group in batch:
            weights = {name: value[group.at] for name, value in at.items()}
            others = {**self._tensors, **self._others}
            others = {k: v[group.at] for k, v in others.items() if k not in weights}
            with torch.random.fork_rng():  # the model's own step draws the same
                step = self._loss.step(weights, others, group.batch, group.index, {}, group.sizes)
            gradients = with_rows(gradients, group, step.gradients, at)
            if gradients.keys() != step.gradients.keys():
                raise RuntimeError("the loss depends on other parameters in some of the steps")
            for name, value in step.buffers.items():
                if name in self._others:
                    self._others[name][group.at] = value
        return gradients

    def step(self, gradient: State) -> None:
        """Take one step of the optimizer, with the Trainer's clipping of each client."""
        clip(gradient, self._loss.trainer)
        for name, parameter in self.parameters.items():
            parameter.grad = gradient.get(name)
        self._optimizer.step()
