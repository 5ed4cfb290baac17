"""The training steps of a stack of clients."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from flsuite.aggregators.objectives.feature_term import FeatureCallback
from flsuite.aggregators.objectives.second_steps import SecondCallback
from flsuite.aggregators.optimizers import optimizer_for
from flsuite.common.state import State, clone
from flsuite.federation.client.stack_batches import StackBatches
from flsuite.federation.client.stack_callbacks import StackCallbacks
from flsuite.federation.client.stack_member import Member, stacked, stated
from flsuite.federation.client.stackable import by_sample
from flsuite.federation.client.stacked_loss import StackedLoss, StackGroup, clip, with_rows
from flsuite.federation.client.stacked_second import StackedSecond
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models.layers import entry_names


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
        self._trainer, self._tensors, self.members = trainer, tensors, members
        first = members[0]
        own = dict(first.module.named_parameters())
        stepping = {id(p) for group in first.optimizer.param_groups for p in group["params"]}
        able = [k for k, p in own.items() if p.requires_grad and id(p) in stepping]
        self.by_sample = by_sample(first.callbacks)
        # With noise for each sample, parameters without a gradient take steps too, and those that
        # take none count in the norm of a sample's gradient.
        self._parameters = {k: tensors[k] for k in able if k in used or self.by_sample}
        # Gradients of the others show whether every step uses the same parameters.
        trained = [k for k, p in own.items() if p.requires_grad]
        self.leaves = {name: tensors[name] for name in (trained if self.by_sample else able)}
        self.others = {name: value for name, value in tensors.items() if name not in self.leaves}
        self._samples: dict[int, State] = {}  # gradients by sample, of a step's clients
        self.losses = torch.zeros(len(members), device=trainer.strategy.root_device)
        self._logged: list[dict[str, tuple[float, int]]] = [{} for _ in members]
        self._entries = entry_names(model)

        replaced = {id(own[name]): value for name, value in self._parameters.items()}
        self._optimizer = optimizer_for(first.optimizer, replaced)
        self._callbacks = StackCallbacks(members, tensors, self._parameters, self._optimizer)
        starts = self._callbacks.start()
        term, second = (stated(members, kind) for kind in (FeatureCallback, SecondCallback))
        self.loss = StackedLoss(model, trainer, term)
        self.held = tree_map(lambda *parts: stacked(parts), *starts[FeatureCallback] or [{}])
        if second:
            plain = StackedLoss(model, trainer)
            models = StackedSecond(second, starts[SecondCallback], members, tensors, plain)
            self._callbacks.second = models

    def run(self, batches: StackBatches) -> list[tuple[State, dict[str, float]]]:
        """Take all steps, and return each client's state and metrics.

        Clients without a batch left move on too, without an effect: their results have been read.

        Args:
            batches: The batches.
        """
        ends: list[State] = [{} for _ in self.members]
        last = max(member.steps for member in self.members)
        for step, groups in enumerate(batches):
            self._callbacks.begin_epochs(step)
            self._step(step, groups)
            for place in chain.from_iterable(group.places for group in groups):
                if step + 1 == self.members[place].steps:
                    self._callbacks.end(place)
                    end = self._state_of(place)
                    ends[place] = end if step + 1 == last else clone(end, device=None)
        return [(end, self._metrics(place)) for place, end in enumerate(ends)]

    def _step(self, step: int, groups: Sequence[StackGroup]) -> None:
        """Take one step of the clients that have a batch left."""
        gradients: State = {}
        if second := self._callbacks.second:
            second.take_steps(groups, step)
        for group in groups:
            own = self._gradients(step, group)
            gradients = with_rows(gradients, group, own, self._parameters)
        self._callbacks.show(step, groups, gradients, self._samples)
        clip(gradients, self._trainer)
        for name, parameter in self._parameters.items():
            parameter.grad = gradients.get(name)
        self._optimizer.step()

    def _gradients(self, step: int, group: StackGroup) -> State:
        """Return the gradients of a group's clients, and keep the rest of what the step gives."""
        at = group.at
        rests = {name: self.leaves[name] for name in self._callbacks.frozen & self.leaves.keys()}
        leaves = {name: value[at] for name, value in self.leaves.items() if name not in rests}
        others = {name: value[at] for name, value in {**self.others, **rests}.items()}
        held = tree_map(lambda part: part[at], self.held)
        sizes = group.sizes
        if self.by_sample and sizes is None:
            sizes = torch.tensor(group.samples(), device=self.losses.device)
        own = group.batch, group.index
        done = self.loss.step(leaves, others, *own, held, sizes, self.by_sample)
        stepping = self._parameters.keys() - self._callbacks.frozen
        if not self.by_sample and done.gradients.keys() != stepping:
            raise RuntimeError("the loss depends on other parameters in some of the steps")

        for name, value in done.buffers.items():
            self.others[name][at] = value
        self.losses[at] += done.losses
        self._log(step, group, done.logged)
        if not self.by_sample:
            return done.gradients
        for i, (place, size) in enumerate(zip(group.places, group.samples(), strict=True)):
            self._samples[place] = {k: g[i, :size] for k, g in done.gradients.items()}
        return {k: torch.zeros_like(p[at]) for k, p in self._parameters.items()}

    def _log(self, step: int, group: StackGroup, logged: Mapping[str, Tensor]) -> None:
        """Add what the clients log to the sums over their last epochs, by sizes of batches.

        Of a value of a step, only the last one stays.
        """
        for name, values in logged.items():
            samples = group.samples()
            for place, value, size in zip(group.places, values.tolist(), samples, strict=True):
                member, sums = self.members[place], self._logged[place]
                if step >= member.steps - len(member.loader):
                    is_of_step = name in self.loss.of_step
                    total, seen = (0.0, 0) if is_of_step else sums.get(name, (0.0, 0))
                    sums[name] = total + value * size, seen + size

    def _state_of(self, place: int) -> State:
        """Return a client's state."""
        return {name: self._tensors[name][place] for name in self._entries}

    def _metrics(self, place: int) -> dict[str, float]:
        loss = float(self.losses[place]) / self.members[place].steps
        logged = {name: total / seen for name, (total, seen) in self._logged[place].items()}
        return {"loss": loss, **logged}
