"""Optimizers with the settings of a model's own, for other tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.optimizers import optimizer_for
from flsuite.common.state import State

_OF_THE_STEP = ("step", "mu_product")  # numbers that depend on the steps taken alone


class TensorOptimizer:
    """An optimizer for other tensors than the model's parameters.

    They are the weights of a stack of clients, each ``(clients, ...)``, or other weights of one
    client or of a stack.

    Args:
        template: An optimizer that the model has configured.
        names: Names of the model's parameters, by their ``id``.
        tensors: The tensors to step, by these names. They change in place.
        clip: Returns clipped gradients. Default: they stay.

    Attributes:
        template: The model's optimizer. It takes no step here.
        names: Names of its parameters.
    """

    def __init__(
        self,
        template: Optimizer,
        names: Mapping[int, str],
        tensors: Mapping[str, Tensor],
        clip: Callable[[State], State] | None = None,
    ) -> None:
        self.template, self._tensors, self._clip = template, dict(tensors), clip
        own = [p for group in template.param_groups for p in group["params"]]
        # The parameters by name, each with its number in the optimizer's state dict.
        self._own = {names[id(p)]: (index, p) for index, p in enumerate(own) if id(p) in names}
        replaced = {id(p): tensors[name] for name, (_, p) in self._own.items() if name in tensors}
        self._optimizer = optimizer_for(template, replaced)
        self.names = self._own.keys()

    def for_tensors(self, tensors: Mapping[str, Tensor]) -> "TensorOptimizer":
        """Return a new optimizer with the same settings for other tensors, without state."""
        names = {id(p): name for name, (_, p) in self._own.items()}
        return TensorOptimizer(self.template, names, tensors, self._clip)

    def step_from(self, values: State, gradients: State) -> State:
        """Return values of the tensors after a step. Other entries stay."""
        for name, tensor in self._tensors.items():
            tensor.data = torch.empty_like(tensor).copy_(values[name])  # in its own layout
        # Copies, because some optimizers change gradients in place, and these may be held.
        self.step({name: value.clone() for name, value in gradients.items()})
        return {**values, **{name: tensor.data for name, tensor in self._tensors.items()}}

    @property
    def rate(self) -> float:
        """Return the learning rate."""
        return float(self.template.param_groups[0]["lr"])

    def step(self, gradients: State) -> None:
        """Take one step. Parameters without a gradient take none."""
        own = {name: value for name, value in gradients.items() if name in self._tensors}
        clipped = self._clip(own) if self._clip else own
        for name, tensor in self._tensors.items():
            tensor.grad = clipped.get(name)
        for group, own in zip(
            self._optimizer.param_groups, self.template.param_groups, strict=True
        ):  # schedulers change the rate, and some the momentum
            group.update({key: value for key, value in own.items() if key != "params"})
        self._optimizer.step()

    def load(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the state dicts of the clients' own optimizers, which are alike."""
        for name, (index, _) in self._own.items():
            states = [own["state"].get(index, {}) for own in kept]
            if name in self._tensors and states[0]:
                tensor = self._tensors[name]
                self._optimizer.state[tensor] = {
                    key: _joined(key, [state[key] for state in states], tensor) for key in states[0]
                }

    def state_dict(self, place: int) -> dict[str, Any]:
        """Return the state dict of one client's optimizer, on the CPU."""
        state = {
            self._own[name][0]: {key: _part(key, value, place, "cpu") for key, value in own.items()}
            for name, own in self._states()
        }
        return {"state": state, "param_groups": self.template.state_dict()["param_groups"]}

    def states_of(self, place: int) -> dict[Tensor, dict[str, Any]]:
        """Return one client's part of the state by parameter of the template, without copies."""
        return {
            self._own[name][1]: {key: _part(key, value, place) for key, value in own.items()}
            for name, own in self._states()
        }

    def take(self, place: int, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuse changes of one client's state that are not in place.

        Raises:
            RuntimeError: If a callback has replaced a tensor or changed a number.
        """
        for parameter, before in self.states_of(place).items():
            after = states.get(parameter, {})
            if after.keys() != before.keys() or not all(
                map(_is_same, before.values(), after.values())
            ):
                raise RuntimeError("a callback replaces the optimizer's state; change it in place")
        if len(states) != len(self.states_of(place)):
            raise RuntimeError("a callback gives the optimizer of one client a state")

    def _states(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the state of each parameter that has one."""
        own = ((name, self._optimizer.state.get(t)) for name, t in self._tensors.items())
        return [(name, state) for name, state in own if state]


def past_of(states: Sequence[Mapping[str, Any]] | None) -> tuple[Any, ...]:
    """Return what the kept states of clients must have in common to train in one stack.

    Args:
        states: The state dicts of a client's optimizers, from its last fit.
    """
    return tuple(
        (index, key, None if _is_stacked(key, value) else float(value))
        for one in states or ()
        for index, state in one["state"].items()
        for key, value in state.items()
        if value is not None
    )


def _joined(key: str, values: Sequence[Any], like: Tensor) -> Any:
    """Return an entry of the state of all clients, of the dtype in which torch loads it."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    dtype = first.dtype if key == "step" else like.dtype
    if _is_stacked(key, first):
        return torch.stack([value.to(like.device, dtype) for value in values])
    return first.to(dtype, copy=True)  # the kept one is the client's


def _part(key: str, value: Any, place: int, device: str | None = None) -> Any:
    """Return a client's part of an entry of the state. With a device, it is a copy there."""
    if not isinstance(value, Tensor):
        return value
    own = value[place] if _is_stacked(key, value) else value.clone()
    return own if device is None else own.detach().to(device, copy=True)


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.ndim:
        return before.data_ptr() == after.data_ptr()
    return bool(before == after)


def _is_stacked(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in _OF_THE_STEP
