"""The callbacks of a stack of clients: each acts on one client, as in a fit by itself."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.objectives.base import StatedCallback
from flsuite.aggregators.objectives.second_steps import SecondCallback
from flsuite.common.state import State
from flsuite.federation.client.callbacks import KeepOptimizers
from flsuite.federation.client.stack_member import Member, callbacks_of
from flsuite.federation.client.stackable import by_sample, phases
from flsuite.federation.client.stacked_loss import StackGroup
from flsuite.federation.client.stacked_optimizer import gather_states, hand_state, has_state
from flsuite.federation.client.stacked_second import StackedSecond


class StackCallbacks:
    """Calls the callbacks of each client, in the order of a fit.

    Args:
        members: The clients.
        tensors: All tensors of their models, each ``(clients, ...)``.
        parameters: Those that the optimizer steps.
        optimizer: The optimizer of the stack.

    Attributes:
        frozen: Names of the parameters that rest in this epoch.
        second: The second models, which change gradients in their place among the callbacks.
    """

    def __init__(
        self,
        members: Sequence[Member],
        tensors: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer,
    ) -> None:
        self._members, self._tensors = members, tensors
        self._parameters, self._optimizer = parameters, optimizer
        kinds = map(type, members[0].callbacks)
        self._has_users = not all(kind.__module__.startswith("flsuite.") for kind in kinds)
        self._keeps = bool(callbacks_of(members, KeepOptimizers))
        self.frozen: frozenset[str] = frozenset()
        self.second: StackedSecond | None = None

    def start(self) -> dict[type[Callback], list[Any]]:
        """Start the fits, and return what objectives state of each client, by kind."""
        starts: dict[type[Callback], list[Any]] = defaultdict(list)
        for place, member in enumerate(self._members):
            before = _frozen(member)
            for callback in _own(member.callbacks):
                callback.on_fit_start(member.trainer, member.module)
            for callback in member.callbacks:
                if isinstance(callback, StatedCallback):
                    starts[type(callback)].append(callback.begin(member.module))
                else:
                    callback.on_train_start(member.trainer, member.module)
            self._refuse_own_settings(place)
            if _frozen(member) != before:
                raise RuntimeError("a callback freezes parameters before the first epoch")
        if self._keeps or self._has_users:  # they may have changed it
            gather_states(self._optimizer, self._parameters, self._members)
        return starts

    def begin_epochs(self, step: int) -> None:
        """Begin the epochs that start with this step. A callback may freeze parameters in it."""
        if not phases(self._members[0].callbacks):
            return
        for place, member in enumerate(self._members):  # they begin their epochs together
            if step % len(member.loader) == 0:
                member.trainer.move_to(step)
                self._hand_state(place)
                for callback in _own(member.callbacks):
                    callback.on_train_epoch_start(member.trainer, member.module)
                self._refuse_own_settings(place)
                self._refuse_other_state(place)
        self.frozen, *others = map(_frozen, self._members)
        if any(names != self.frozen for names in others):
            raise RuntimeError("a callback freezes other parameters for other clients")

    def show(
        self, step: int, groups: Sequence[StackGroup], gradients: State, samples: dict[int, State]
    ) -> None:
        """Show the gradients to the callbacks in order. They may change or take them away.

        Args:
            step: The step.
            groups: The clients with a batch left.
            gradients: Each ``(clients, ...)``. They change in place.
            samples: The gradients by sample of some clients, ``(batch, ...)``.
        """
        kinds = [type(callback) for callback in self._members[0].callbacks]
        place = kinds.index(SecondCallback) if SecondCallback in kinds else 0
        for is_after, part in enumerate((slice(0, place), slice(place, None))):
            if is_after and self.second:
                self.second.change(gradients)
            if not _own(self._members[0].callbacks[part]):
                continue
            resting = [
                self._show(step, group, i, gradients, samples, part)
                for group in groups
                for i in range(len(group.places))
            ]
            for name in set().union(*resting):
                if not all(name in names for names in resting):
                    raise RuntimeError(f"clients take steps of {name} at different times")
                del gradients[name]

    def _show(
        self,
        step: int,
        group: StackGroup,
        index: int,
        gradients: State,
        samples: dict[int, State],
        part: slice,
    ) -> set[str]:
        """Show a client's gradients to some of its callbacks, which may change or replace them.

        Returns the parameters whose gradients they have taken away, so that they take no step.
        """
        place = group.places[index]
        member = self._members[place]
        callbacks, batches = _own(member.callbacks[part]), len(member.loader)
        by_name = samples.pop(place, {})
        shown = {}
        for name, parameter in member.module.named_parameters():
            if name in by_name:
                parameter.grad_sample = by_name[name]  # type: ignore[attr-defined]
            if name in gradients:
                shown[name] = parameter
                parameter.grad = gradients[name][place]
        member.trainer.move_to(step)
        self._hand_state(place)
        for callback in callbacks:
            at = member.trainer, member.module
            if phases([callback]):
                callback.on_train_batch_start(*at, group.batch_of(index), step % batches)
            elif by_sample([callback]):
                callback.on_train_batch_start(*at, None, step % batches)
            callback.on_before_optimizer_step(*at, member.optimizer)
        for name, parameter in shown.items():
            if parameter.grad is not None and not _is_same(parameter.grad, gradients[name][place]):
                gradients[name][place] = parameter.grad
        self._refuse_own_settings(place)
        self._refuse_other_state(place)
        return {name for name, parameter in shown.items() if parameter.grad is None}

    def end(self, place: int) -> None:
        """End a client's fit."""
        member = self._members[place]
        self._hand_state(place, copies=True)
        if member.callbacks:
            member.trainer.move_to(member.steps)
        for callback in member.callbacks:
            if self.second and isinstance(callback, SecondCallback):
                self.second.end(place)
            elif not isinstance(callback, StatedCallback):
                callback.on_train_end(member.trainer, member.module)
        self._refuse_own_settings(place)
        member.has_ended = True

    def _hand_state(self, place: int, copies: bool = False) -> None:
        """Show a client's callbacks the state of its optimizer, where some may read it."""
        if self._has_users or (self._keeps and copies):
            member = self._members[place]
            hand_state(self._optimizer, self._parameters, member, place, copies)

    def _refuse_own_settings(self, place: int) -> None:
        """Refuse what a callback of the user has set for one client, and a stack has for all."""
        if not self._has_users:
            return
        member, options = self._members[place], _options(self._optimizer)
        for name, parameter in member.module.named_parameters():
            if not _is_same(parameter, self._tensors[name][place]):
                raise RuntimeError(f"a callback gives {name} other memory; change it in place")
        if _options(member.optimizer) != options or member.trainer.should_stop:
            raise RuntimeError("a callback changes a client's optimizer, or stops its fit")

    def _refuse_other_state(self, place: int) -> None:
        """Refuse a state of a client's optimizer that a callback of the user has replaced."""
        at = self._optimizer, self._parameters, self._members[place], place
        if self._has_users and not has_state(*at):
            raise RuntimeError("a callback replaces the optimizer's state; change it in place")


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return ours.data_ptr() == theirs.data_ptr()


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer, without its parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _frozen(member: Member) -> frozenset[str]:
    """Return the parameters of a client's model that do not train now."""
    if not member.callbacks:
        return frozenset()
    return frozenset(name for name, p in member.module.named_parameters() if not p.requires_grad)


def _own(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that act on one client. The stated ones act on all."""
    return [one for one in callbacks if not isinstance(one, StatedCallback)]
