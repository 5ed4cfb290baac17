"""The training steps of a stack of clients."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from flsuite.aggregators.halves import Halves
from flsuite.aggregators.losses import drawing_from, random_state
from flsuite.aggregators.objectives.checks import no_change_in_place
from flsuite.common.client import Evaluation
from flsuite.common.state import State, clone
from flsuite.federation.client.algorithm_steps import AlgorithmSteps
from flsuite.federation.client.callbacks import SampleGradients
from flsuite.federation.client.fit import one_step
from flsuite.federation.client.logs import LoggedNumbers
from flsuite.federation.client.recorded import Recorder
from flsuite.federation.client.stack_batches import StackBatches
from flsuite.federation.client.stack_member import Member, stacked
from flsuite.federation.client.stacked_loss import Numbers, StackedLoss, StackGroup, with_rows
from flsuite.federation.client.tensor_optimizer import TensorOptimizer
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
        halves: What the algorithm does in the steps.
        optimizer: Steps the trainable tensors.
        schedulers: The schedulers of its learning rate, as Lightning runs them.
        private: Each client's callback that reads gradients by sample, if any.
        recorder: Replays steps that have been recorded.
    """

    def __init__(
        self,
        model: LightningModule,
        used: Sequence[str],
        trainer: ClientTrainer,
        tensors: dict[str, Tensor],
        members: Sequence[Member],
        halves: Halves,
        optimizer: TensorOptimizer,
        schedulers: Sequence[Any] = (),
        private: Sequence[SampleGradients] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._trainer, self._tensors, self.members = trainer, tensors, members
        self.halves, self.optimizer, self._schedulers = halves, optimizer, schedulers
        self.private = private
        trained = [k for k, p in model.named_parameters() if p.requires_grad and k in tensors]
        # The others show whether every step uses the same parameters, and their gradients count in
        # the norm of a sample's gradient.
        self.leaves = {name: tensors[name] for name in trained}
        # With noise for each sample, parameters without a gradient take steps too.
        stepping = {name for name in trained if name in used or private} & optimizer.names
        self._parameters = {name: tensors[name] for name in trained if name in stepping}
        self.others = {name: value for name, value in tensors.items() if name not in self.leaves}
        self.losses = torch.zeros(len(members), device=trainer.strategy.root_device)
        self._logged = [LoggedNumbers() for _ in members]
        self._entries = entry_names(model)
        self._frozen: frozenset[str] = frozenset()
        self._second: dict[str, TensorOptimizer] = {}

        device = trainer.strategy.root_device
        of_parts = zip(*(member.helds for member in members), strict=True)
        helds = [tree_map(lambda *parts: stacked(parts, device), *held) for held in of_parts]
        self.algorithm = AlgorithmSteps(halves, self, helds)
        self.loss = StackedLoss(model, trainer, halves.term, recorder)
        self._plain_loss = self.loss
        if halves.term:
            self._plain_loss = StackedLoss(model, trainer, recorder=recorder)

    @property
    def weights(self) -> State:
        return {name: value.detach() for name, value in self.leaves.items()}

    @property
    def rate(self) -> float:
        return self.optimizer.rate

    def run(self, batches: StackBatches, end: Callable[[int, State], None]) -> list[State]:
        """Take all steps, and return each client's state.

        Clients without a batch left move on too, without an effect: their results have been read.

        Args:
            batches: The batches.
            end: Ends the fit of a client, given its place and its state.
        """
        ends: list[State] = [{} for _ in self.members]
        last = max(member.steps for member in self.members)
        for step, groups in enumerate(batches):
            self._begin_epoch(step)
            self._step(step, groups)
            self._schedule(step)
            for place in chain.from_iterable(group.places for group in groups):
                if step + 1 == self.members[place].steps:
                    state = {name: self._tensors[name][place] for name in self._entries}
                    end(place, state)
                    ends[place] = state if step + 1 == last else clone(state, device=None)
        return ends

    def helds_of(self, place: int) -> list[Any]:
        """Return what the parts of the algorithm hold of one client."""
        return tree_map(lambda part: part[place].clone(), self.algorithm.helds)

    def metrics(self) -> list[dict[str, float]]:
        """Return the mean loss of each client, and what its model has logged."""
        of_all = zip(self.members, self.losses.tolist(), self._logged, strict=True)
        return [{"loss": loss / one.steps, **logged.numbers()} for one, loss, logged in of_all]

    def _begin_epoch(self, step: int) -> None:
        """Begin an epoch: some parameters may rest in it. All clients begin it together."""
        first = self.members[0]
        if self.halves.has_phases and step % first.epoch_steps == 0:
            names = self.halves.trains(step // first.epoch_steps, self.leaves.keys())
            self._frozen = frozenset(self.leaves.keys() - names)

    def _schedule(self, step: int) -> None:
        """Step the schedulers after a step, as Lightning does. All clients have as many steps."""
        epoch, index = divmod(step, self.members[0].epoch_steps)
        ends = index + 1 == self.members[0].epoch_steps
        for config in self._schedulers:
            done = epoch + 1 if config.interval == "epoch" else index + 1
            if done % config.frequency == 0 and (ends or config.interval == "step"):
                config.scheduler.step()

    def _step(self, step: int, groups: Sequence[StackGroup]) -> None:
        """Take one step of the clients that have a batch left."""
        own: State = {}
        at = {} if self.private else self.algorithm.ahead() or {}
        for group in groups:
            changes = self.halves.changes_gradients
            group.draws = random_state(self.losses.device) if changes else None
            own = with_rows(own, group, self._gradients(step, group, at), self._parameters)
        is_last = step + 1 == self.members[0].steps  # read where clients have as many steps each
        gradient = self.algorithm.gradient(own, groups, is_last)
        if gradient is None:
            return
        taken = one_step(self.optimizer.template, frozenset(gradient))
        for place in chain.from_iterable(group.places for group in groups):
            if fit := self.members[place].fit:
                fit.record(taken)
        stepping = {k: g.contiguous() for k, g in gradient.items() if k in self.optimizer.names}
        self.optimizer.step(stepping)

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        together = torch.vmap(function, randomness="different")

        def of_all(*trees: Any) -> Any:
            try:
                return together(*trees)
            except RuntimeError as error:
                if "vmap" not in str(error):
                    raise
                names = " or ".join(type(part).__name__ for part in self.halves.with_gradients)
                raise RuntimeError(
                    f"gradient of {names} reads a number or changes a tensor in place; compute "
                    "with tensors, as torch.where does, so that it serves all clients at once"
                ) from error

        return of_all

    def _gradients(self, step: int, group: StackGroup, other: State) -> State:
        """Return the gradients of a group's clients, and keep the rest of what the step gives.

        Args:
            step: The number of the step.
            group: The group.
            other: The parameters of all clients, if not the present ones.
        """
        at, parameters = group.at, {**self.leaves, **other}
        rests = {name: parameters[name] for name in self._frozen & self.leaves.keys()}
        leaves = {name: value[at] for name, value in parameters.items() if name not in rests}
        others = {name: value[at] for name, value in {**self.others, **rests}.items()}
        held = tree_map(lambda part: part[at], self.algorithm.held)
        sizes = group.sizes
        if self.private and sizes is None:
            sizes = torch.tensor(group.samples(), device=self.losses.device)
        given = leaves, others, group.batch, group.index, held, sizes
        done = self.loss.step(*given, by_sample=bool(self.private))
        own = {k: g for k, g in done.gradients.items() if k in self.optimizer.names}
        if not self.private and own.keys() != self._parameters.keys() - self._frozen:
            raise RuntimeError("the loss depends on other parameters in some of the steps")

        for name, value in done.buffers.items():
            self.others[name][at] = value
        self.losses[at] += done.losses
        self._log(step, group, done.logged)
        return self._noised(step, group, done.gradients) if self.private else own

    def _noised(self, step: int, group: StackGroup, samples: State) -> State:
        """Return the clients' gradients, which their callbacks clip and noise by sample."""
        rows = []
        for i, (place, size) in enumerate(zip(group.places, group.samples(), strict=True)):
            own = {name: gradient[i, :size] for name, gradient in samples.items()}
            parameters = {name: value[place] for name, value in self.leaves.items()}
            index = step % self.members[place].epoch_steps
            rows.append(self.private[place].gradient(own, parameters, index))
        return {name: torch.stack([row[name] for row in rows]) for name in self._parameters}

    def _log(self, step: int, group: StackGroup, logged: Numbers) -> None:
        """Add what the clients log in a step."""
        for place in group.places if logged else ():
            if step % self.members[place].epoch_steps == 0:
                self._logged[place].begin_epoch()
        for (name, is_of_step), values in logged.items():
            rows = zip(group.places, values.tolist(), group.samples(), strict=True)
            for place, value, size in rows:
                self._logged[place].add(name, value, size, is_of_step)

    def of_all(self, at: State) -> State:
        whole: State = {}

        def seen(of_all: State) -> State:
            whole.update(of_all)
            return of_all

        _for_all(seen, at)
        return {name: value.detach().contiguous() for name, value in whole.items()}

    def evaluate(self, at: State, batch: Sequence[StackGroup], in_full: bool) -> Evaluation:
        return Evaluation(*_for_all(partial(self._evaluate_all, batch, in_full), at))

    def _evaluate_all(self, groups: Sequence[StackGroup], in_full: bool, at: State) -> Evaluation:
        """Return the losses at other weights, with one row per client, zero without a batch.

        Raises:
            RuntimeError: If the losses do not all depend on the same parameters.
        """
        if self.private:
            raise RuntimeError("an algorithm trains at other weights, without the noise of DPSGD")
        if strange := at.keys() - self._tensors.keys():  # its fit by itself says more
            raise RuntimeError(f"the model has no {min(strange)}")
        own = {name: value for name, value in at.items() if name in self.leaves}
        rest = {**self._tensors, **at}
        losses, gradients, buffers = torch.zeros_like(self.losses), State(), State()
        for group in groups:
            leaves = {name: value[group.at] for name, value in own.items()}
            others = {k: v[group.at] for k, v in rest.items() if k not in own}
            draws = drawing_from(self.losses.device, group.draws)  # as the model's own step
            with draws, no_change_in_place(self.loss.model, group.batch):
                step = self._plain_loss.step(
                    leaves, others, group.batch, group.index, {}, group.sizes, in_full=in_full
                )
            gradients = with_rows(gradients, group, step.gradients, own)
            buffers = with_rows(buffers, group, step.buffers, self._tensors)
            losses[group.at] += step.losses
            if gradients.keys() != step.gradients.keys():
                raise RuntimeError("the loss depends on other parameters in some of the steps")
        return Evaluation(losses, gradients, {k: v for k, v in buffers.items() if k in at})

    def step_other(self, name: str, v: State, gradient: State) -> State:
        return _for_all(partial(self._step_all, name), v, gradient)

    def _step_all(self, name: str, v: State, gradients: State) -> State:
        """Return other weights after a step of a copy of the optimizer."""
        if name not in self._second:
            own = {k: torch.empty_like(self.leaves[k]) for k in v if k in self.leaves}
            self._second[name] = self.optimizer.for_tensors(own)
        return self._second[name].step_from(v, gradients)


def _for_all(function: Callable[..., Any], *trees: Any) -> Any:
    """Call a function with the tensors of all clients, from within ``torch.vmap``.

    Args:
        function: Receives the trees with the clients along the first axis of each tensor, and
            returns such a tree.
        trees: Trees of one client's tensors.
    """
    leaves, structure = torch.utils._pytree.tree_flatten(trees)
    returned: list[Any] = []

    def on_leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
        parts, own = torch.utils._pytree.tree_flatten(
            function(*torch.utils._pytree.tree_unflatten(list(tensors), structure))
        )
        returned.append(own)
        return tuple(parts)

    parts = _Batched.apply(on_leaves, *leaves)
    return torch.utils._pytree.tree_unflatten(list(parts), returned[0])


class _Batched(torch.autograd.Function):
    """A function that ``torch.vmap`` calls once, with the tensors of all clients."""

    @staticmethod
    def forward(function: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("the gradients of a stack are computed for all its clients")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], function: Callable[..., Any], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        whole = [
            tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        parts = function(*whole)
        return parts, (0,) * len(parts)
