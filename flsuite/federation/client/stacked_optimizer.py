"""The state of a stack's optimizer, and each client's part of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from flsuite.federation.client.stack_member import Member, stacked

_OF_THE_STEP = ("step", "mu_product")  # numbers that depend on the steps taken alone


def past_of(states: Sequence[Mapping[str, Any]] | None) -> tuple[Any, ...]:
    """Return what the kept states of clients must have in common to train in one stack.

    Args:
        states: The state dicts of a client's optimizers, from its last fit.
    """
    entries = (
        (index, key, kind)
        for one in states or ()
        for index, state in one["state"].items()
        for key, kind in _shared(state).items()
    )
    return tuple(entries)


def gather_states(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], members: Sequence[Member]
) -> None:
    """Give the optimizer of a stack the states of the clients' own ones.

    Args:
        optimizer: The optimizer.
        parameters: The parameters that it steps, each ``(clients, ...)``.
        members: The clients.

    Raises:
        RuntimeError: If their states are of different kinds.
    """
    own = [dict(member.module.named_parameters()) for member in members]
    for name, parameter in parameters.items():
        states = [
            member.optimizer.state.get(one[name], {})
            for member, one in zip(members, own, strict=True)
        ]
        if any(_shared(state) != _shared(states[0]) for state in states[1:]):
            raise RuntimeError("the optimizers of clients have states of different kinds")
        if states[0]:
            optimizer.state[parameter] = {
                key: stacked([state[key] for state in states]).contiguous()
                if _is_stacked(key, value)
                else value
                for key, value in states[0].items()
            }


def hand_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    member: Member,
    place: int,
    copies: bool = False,
) -> None:
    """Give a client's own optimizer its part of the stack's state, see :func:`gather_states`.

    Args:
        optimizer: The optimizer.
        parameters: The parameters that it steps, each ``(clients, ...)``.
        member: The client.
        place: Its place in the stack.
        copies: Whether to copy it. A kept view would keep the whole stack's memory.
    """
    own = dict(member.module.named_parameters())
    for name, parameter in parameters.items():
        if state := optimizer.state.get(parameter):
            member.optimizer.state[own[name]] = {
                key: _part(key, value, place, copies) for key, value in state.items()
            }


def has_state(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], member: Member, place: int
) -> bool:
    """Return whether a client's own optimizer still has what :func:`hand_state` has given it.

    Its tensors may have changed in place, but not the numbers that the stack has for all clients.
    The arguments are as in :func:`hand_state`.
    """
    own = dict(member.module.named_parameters())
    for name, parameter in parameters.items():
        ours, theirs = optimizer.state.get(parameter, {}), member.optimizer.state.get(own[name], {})
        if _shared(ours) != _shared(theirs):
            return False
        for key, value in ours.items():
            if _is_stacked(key, value) and value[place].data_ptr() != theirs[key].data_ptr():
                return False
    return True


def _part(key: str, value: Any, place: int, copies: bool) -> Any:
    """Return a client's part of an entry of the stack's state."""
    if not isinstance(value, Tensor):
        return value
    if not _is_stacked(key, value):
        return value.clone()
    return value[place].clone() if copies else value[place]


def _shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a stack has for all clients: numbers, and which entries are tensors."""

    def shared(key: str, value: Any) -> Any:
        if _is_stacked(key, value):
            return Tensor
        return float(value) if isinstance(value, Tensor) else value

    return {key: shared(key, value) for key, value in state.items()}


def _is_stacked(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and key not in _OF_THE_STEP
