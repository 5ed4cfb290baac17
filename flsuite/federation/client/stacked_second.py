"""The second models of a stack of clients, which train next to their models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flsuite.aggregators.objectives.second_steps import SecondSteps, model_gradient, take_steps
from flsuite.aggregators.optimizers import optimizer_for
from flsuite.common.state import State, clone
from flsuite.federation.client.stack_member import Member, stacked
from flsuite.federation.client.stacked_loss import StackedLoss, StackGroup, clip, with_rows


class StackedSecond:
    """The second models of a stack of clients, with one row per client.

    Args:
        objective: States the steps.
        starts: What it has read of each client, at the start of its fit.
        members: The clients.
        tensors: Tensors of their models, each ``(clients, ...)``, which the steps read.
        loss: Computes the losses.

    Attributes:
        parameters: The trainable tensors, each ``(clients, ...)``.
    """

    def __init__(
        self,
        objective: SecondSteps,
        starts: Sequence[tuple[State, State]],
        members: Sequence[Member],
        tensors: Mapping[str, Tensor],
        loss: StackedLoss,
    ) -> None:
        self._objective, self._members = objective, members
        self._loss, self._tensors, first = loss, tensors, members[0]
        weights, helds = zip(*starts, strict=True)
        self._held = tree_map(lambda *parts: stacked(parts), *helds)

        own = first.module.state_dict()
        copies = {
            name: stacked([start[name] for start in weights]).to(own[name], copy=True).contiguous()
            for name in weights[0]
        }
        trained = {name: p for name, p in first.module.named_parameters() if p.requires_grad}
        self.parameters = {name: copies.pop(name) for name in trained if name in copies}
        self._others = copies
        replaced = {id(trained[name]): value for name, value in self.parameters.items()}
        self._optimizer = optimizer_for(first.optimizer, replaced)

    def take_steps(self, groups: Sequence[StackGroup], index: int) -> None:
        """Take the steps of all clients on one batch each."""
        w = {name: self._tensors[name].detach() for name in self.parameters}
        self._held = take_steps(self._objective, self, w, groups, index, self._held)

    def change(self, gradients: State) -> None:
        """Change the gradients of the models' own steps, in place."""
        if type(self._objective).model_gradient is SecondSteps.model_gradient:
            return
        changed = self.each(partial(model_gradient, self._objective))
        for name in gradients.keys() & self.parameters.keys():
            w, v = self._tensors[name].detach(), self.parameters[name].detach()
            gradients[name].copy_(changed(gradients[name], w, v))

    def end(self, place: int) -> None:
        """End the steps of one client."""
        weights = clone({k: v[place] for k, v in {**self.parameters, **self._others}.items()})
        held = tree_map(lambda part: part[place].clone(), self._held)
        self._objective.end(self._members[place].client, weights, held)

    @property
    def rate(self) -> float:
        """Return the learning rate of the models' optimizers."""
        return float(self._members[0].optimizer.param_groups[0]["lr"])

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of one client's tensors as a function of the stack's."""
        return torch.vmap(function)

    def gradient(self, batch: Sequence[StackGroup], index: int, at: State) -> State:
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
