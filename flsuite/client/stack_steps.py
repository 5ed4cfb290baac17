"""The training steps of a stack of clients."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from flsuite.aggregators.objectives.feature_term import FeatureCallback
from flsuite.aggregators.objectives.held import StatedCallback
from flsuite.aggregators.objectives.second_steps import SecondCallback
from flsuite.aggregators.second_model import first_names, optimizer_for
from flsuite.client.callbacks import KeepOptimizers
from flsuite.client.stack_batches import StackBatches
from flsuite.client.stack_member import Member, callbacks_of, stacked, stated
from flsuite.client.stackable import by_sample, phases
from flsuite.client.stacked_loss import Group, StackedLoss, clip, with_rows
from flsuite.client.stacked_optimizer import gather_states, hand_state, has_state
from flsuite.client.stacked_second import StackedSecond
from flsuite.client.trainer import ClientTrainer
from flsuite.state import State, clone


class StackSteps:
    """The steps of one stack.

    Args:
        model: The structure. Its weights are not used.
        used: Names of the trainable parameters that the loss depends on.
        trainer: Gives the device, the precision and the clipping.
        tensors: All tensors of the models, each ``(clients, ...)``. They change in place.
        members: The clients.
    """

    def __init__(
        self,
        model: LightningModule,
        used: Sequence[str],
        trainer: ClientTrainer,
        tensors: dict[str, Tensor],
        members: Sequence[Member],
    ) -> None:
        self.trainer, self.tensors, self.members = trainer, tensors, members
        first = members[0]
        own = dict(first.module.named_parameters())
        stepping = {id(p) for group in first.optimizer.param_groups for p in group["params"]}
        able = [k for k, p in own.items() if p.requires_grad and id(p) in stepping]
        self.by_sample = by_sample(first.callbacks)
        # With noise for each sample, parameters without a gradient take steps too, and those that
        # take none count in the norm of a sample's gradient.
        self.parameters = {k: tensors[k] for k in able if k in used or self.by_sample}
        # Gradients of the others show whether every step uses the same parameters.
        trained = [k for k, p in own.items() if p.requires_grad]
        self.leaves = {name: tensors[name] for name in (trained if self.by_sample else able)}
        self.others = {name: value for name, value in tensors.items() if name not in self.leaves}
        self.frozen: frozenset[str] = frozenset()  # parameters that rest in this epoch
        self.samples: dict[int, State] = {}  # gradients by sample, of a step's clients
        self.losses = torch.zeros(len(members), device=trainer.strategy.root_device)
        self.logged: list[dict[str, tuple[float, int]]] = [{} for _ in members]
        self.entries = first_names(model, model.state_dict())

        replaced = {id(own[name]): value for name, value in self.parameters.items()}
        self.optimizer = optimizer_for(first.optimizer, replaced)
        kinds = map(type, first.callbacks)
        self._has_users = not all(kind.__module__.startswith("flsuite.") for kind in kinds)
        starts = self._start_callbacks()
        term, second = (stated(members, kind) for kind in (FeatureCallback, SecondCallback))
        self.keeps = bool(callbacks_of(members, KeepOptimizers))
        if self.keeps:
            gather_states(self.optimizer, self.parameters, members)
        self.loss = StackedLoss(model, trainer, term)
        self.held = tree_map(lambda *parts: stacked(parts), *starts[FeatureCallback] or [{}])
        self.second = None
        if second:
            plain = StackedLoss(model, trainer)
            self.second = StackedSecond(second, starts[SecondCallback], members, tensors, plain)

    def run(self, batches: StackBatches) -> list[tuple[State, dict[str, float]]]:
        """Take all steps, and return each client's state and metrics.

        Clients without a batch left move on too, without an effect: their results have been read.

        Args:
            batches: The batches.
        """
        ends: list[State] = [{} for _ in self.members]
        last = max(member.steps for member in self.members)
        for step, groups in enumerate(batches):
            self._begin_epochs(step)
            self._step(step, groups)
            for place in chain.from_iterable(group.places for group in groups):
                if step + 1 == self.members[place].steps:
                    end = self._end(place)
                    ends[place] = end if step + 1 == last else clone(end)
        return [(ends[i], self._metrics(i)) for i in range(len(ends))]

    def _start_callbacks(self) -> dict[type[Callback], list[Any]]:
        """Start the fits, and return what objectives state of each client, by kind."""
        starts: dict[type[Callback], list[Any]] = defaultdict(list)
        for place, member in enumerate(self.members):
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
        return starts

    def _begin_epochs(self, step: int) -> None:
        """Begin the epochs that start with this step. A callback may freeze parameters in it."""
        if not phases(self.members[0].callbacks):
            return
        for member in self.members:  # those of such a stack begin their epochs together
            if step % len(member.loader) == 0:
                member.trainer.move_to(step)
                for callback in _own(member.callbacks):
                    callback.on_train_epoch_start(member.trainer, member.module)
        self.frozen, *others = map(_frozen, self.members)
        if any(names != self.frozen for names in others):
            raise RuntimeError("a callback freezes other parameters for other clients")

    def _step(self, step: int, groups: Sequence[Group]) -> None:
        """Take one step of the clients that have a batch left."""
        gradients: State = {}
        if self.second:
            self.second.take_steps(groups, step)
        for group in groups:
            own = self._gradients(step, group)
            gradients = with_rows(gradients, group, own, self.parameters)
        self._show_all(step, groups, gradients)
        clip(gradients, self.trainer)
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()

    def _show_all(self, step: int, groups: Sequence[Group], gradients: State) -> None:
        """Let the callbacks see the gradients, in their order, and change or take them away."""
        kinds = [type(callback) for callback in self.members[0].callbacks]
        place = kinds.index(SecondCallback) if SecondCallback in kinds else 0
        for is_after, part in enumerate((slice(0, place), slice(place, None))):
            if is_after and self.second:
                self.second.change(gradients)
            if not _own(self.members[0].callbacks[part]):
                continue
            resting = [
                self._show(step, group, i, gradients, part)
                for group in groups
                for i in range(len(group.places))
            ]
            for name in set().union(*resting):
                if not all(name in names for names in resting):
                    raise RuntimeError(f"clients take steps of {name} at different times")
                del gradients[name]

    def _show(self, step: int, group: Group, index: int, gradients: State, part: slice) -> set[str]:
        """Let some callbacks of a client see its gradients, and change or replace them.

        Returns the parameters whose gradients they have taken away, so that they take no step.
        """
        place = group.places[index]
        member = self.members[place]
        callbacks, batches = _own(member.callbacks[part]), len(member.loader)
        samples = self.samples.pop(place, {})
        shown = {}
        for name, parameter in member.module.named_parameters():
            if name in samples:
                parameter.grad_sample = samples[name]  # type: ignore[attr-defined]
            if name in gradients:
                shown[name] = parameter
                parameter.grad = gradients[name][place]
        member.trainer.move_to(step)
        if self._has_users:  # they may read or change its momentum
            hand_state(self.optimizer, self.parameters, member, place)
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

    def _refuse_own_settings(self, place: int) -> None:
        """Refuse what a callback of the user has set for one client, and a stack has for all."""
        if not self._has_users:
            return
        member, options = self.members[place], _options(self.optimizer)
        for name, parameter in member.module.named_parameters():
            if parameter.data_ptr() != self.tensors[name][place].data_ptr():
                raise RuntimeError(f"a callback gives {name} other memory; change it in place")
        if _options(member.optimizer) != options or member.trainer.should_stop:
            raise RuntimeError("a callback changes a client's optimizer, or stops its fit")

    def _refuse_other_state(self, place: int) -> None:
        """Refuse a state of a client's optimizer that a callback of the user has replaced."""
        at = self.optimizer, self.parameters, self.members[place], place
        if self._has_users and not has_state(*at):
            raise RuntimeError("a callback replaces the optimizer's state; change it in place")

    def _gradients(self, step: int, group: Group) -> State:
        """Return the gradients of a group's clients, and keep the rest of what the step gives."""
        at = group.at
        rests = {name: self.leaves[name] for name in self.frozen & self.leaves.keys()}
        leaves = {name: value[at] for name, value in self.leaves.items() if name not in rests}
        others = {name: value[at] for name, value in {**self.others, **rests}.items()}
        held = tree_map(lambda part: part[at], self.held)
        sizes = group.sizes
        if self.by_sample and sizes is None:
            sizes = torch.tensor(group.samples(), device=self.losses.device)
        own = group.batch, group.index
        done = self.loss.step(leaves, others, *own, held, sizes, self.by_sample)
        if not self.by_sample and done.gradients.keys() != self.parameters.keys() - self.frozen:
            raise RuntimeError("the loss depends on other parameters in some of the steps")

        for name, value in done.buffers.items():
            self.others[name][at] = value
        self.losses[at] += done.losses
        self._log(step, group, done.logged)
        if not self.by_sample:
            return done.gradients
        for i, (place, size) in enumerate(zip(group.places, group.samples(), strict=True)):
            self.samples[place] = {k: g[i, :size] for k, g in done.gradients.items()}
        return {k: torch.zeros_like(p[at]) for k, p in self.parameters.items()}

    def _log(self, step: int, group: Group, logged: Mapping[str, Tensor]) -> None:
        """Add what the clients log to the sums over their last epochs, by sizes of batches."""
        for name, values in logged.items():
            samples = group.samples()
            for place, value, size in zip(group.places, values.tolist(), samples, strict=True):
                member, sums = self.members[place], self.logged[place]
                if step >= member.steps - len(member.loader):
                    total, seen = sums.get(name, (0.0, 0))
                    sums[name] = total + value * size, seen + size

    def _end(self, place: int) -> State:
        """End a client's fit, and return its state, under all names of tied weights."""
        member = self.members[place]
        if self.keeps or self._has_users:
            hand_state(self.optimizer, self.parameters, member, place, copies=self.keeps)
        if member.callbacks:
            member.trainer.move_to(member.steps)
        for callback in member.callbacks:
            if self.second and isinstance(callback, SecondCallback):
                self.second.end(place)
            elif not isinstance(callback, StatedCallback):
                callback.on_train_end(member.trainer, member.module)
        self._refuse_own_settings(place)
        member.has_ended = True
        return {name: self.tensors[first][place] for name, first in self.entries.items()}

    def _metrics(self, place: int) -> dict[str, float]:
        loss = float(self.losses[place]) / self.members[place].steps
        logged = {name: total / seen for name, (total, seen) in self.logged[place].items()}
        return {"loss": loss, **logged}


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
