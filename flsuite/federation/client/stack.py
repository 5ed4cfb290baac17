"""Trains many clients as one batched program: their tensors lie along a first axis."""

import copy
import logging
import math
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from flsuite.aggregators.halves import Halves
from flsuite.aggregators.state_check import StateCheck
from flsuite.common.errors import with_place
from flsuite.common.lightning_internals import attached, hooks_with
from flsuite.common.messages import FitRequest, TrainedFit
from flsuite.common.random import seed_process
from flsuite.common.state import State
from flsuite.data.federated import FederatedData
from flsuite.federation.client.conditions import by_sample, hook_beyond, optimizer_of
from flsuite.federation.client.devices import keep_freed_memory
from flsuite.federation.client.fit import OneFit
from flsuite.federation.client.recorded import Recorder
from flsuite.federation.client.setup import StartStates, WorkerSetup, epoch_batches
from flsuite.federation.client.stack_batches import StackBatches
from flsuite.federation.client.stack_member import Member, MemberCallbacks, stacked
from flsuite.federation.client.stack_proofs import (
    is_mean_over_samples,
    refuse_mixed_samples,
    used_parameters,
)
from flsuite.federation.client.stack_steps import StackSteps
from flsuite.federation.client.stacked_loss import clipped
from flsuite.federation.client.tensor_optimizer import TensorOptimizer, past_of
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models import abilities
from flsuite.models.layers import entry_names

log = logging.getLogger(__name__)


class _NoTrainer:
    """Refuses a training step that reads its Trainer, because the clients' epochs differ."""

    def __init__(self, model: str) -> None:
        self._model, self.error = model, None  # type: str, RuntimeError | None

    def __getattr__(self, name: str) -> Any:
        text = f"{self._model} reads trainer.{name}, which differs between clients"
        self.error = RuntimeError(text)
        raise self.error


class Stack:
    """Trains the fits of several clients at the same time.

    Each client takes exactly the steps that it takes alone, on the same batches. Batched kernels
    round differently, so the weights differ in the last digits.

    Args:
        starts: The entries that its fits start from.
        setup: The setup of the worker.
    """

    def __init__(self, starts: StartStates, setup: WorkerSetup) -> None:
        self.starts, self.setup = starts, setup
        self.model = setup.model
        self._algorithm, self._nothing = setup.uplink.aggregator.halves, Halves([])
        self._state_check = StateCheck(setup.uplink.aggregator)
        self._recorder = Recorder() if setup.records else None
        self._level = logging.WARNING
        self._fault: tuple[int, str, str] | None = None
        keep_freed_memory()

    def members_of(
        self, requests: Sequence[FitRequest], trainer: ClientTrainer, data: FederatedData
    ) -> dict[Any, list[Member]]:
        """Return the clients that can be stacked, by what those of one stack have in common.

        The other clients have to train by themselves.

        Args:
            requests: Fits with as many epochs each, of one round or in flight at one time.
            trainer: The Trainer, rewound for them.
            data: The samples, on its device.
        """
        if own := hook_beyond(hooks_with("stack"), requests[0].broadcast.callbacks):
            self._say("clients train one by one: %s, which a stack cannot call", own)
            return {}
        self.halves = self._nothing if requests[0].adapts else self._algorithm
        # A copy, because a step may leave a tensor of the transforms in the model.
        self.model = copy.deepcopy(self.setup.model).to(trainer.strategy.root_device)
        self._names = entry_names(self.model)
        self._optimizers = cache(partial(self._configured, self.model))  # by the round
        self._has_schedulers = bool(self._optimizers(requests[0].broadcast.round)[1])

        if self.halves.has_phases and by_sample(requests[0].broadcast.callbacks):
            return {}  # a frozen layer would get noise, which a fit by itself refuses
        alike: dict[Any, list[Member]] = {}
        for request in requests:
            if request.trained is not None or self.setup.poisons(request):
                continue
            try:
                member = self._member(request, trainer, data)
            except (Exception, SystemExit):  # its fit by itself says why
                continue
            alike.setdefault((self._kind(member, data), request.adapts > 0), []).append(member)
        return alike

    def note_fault(self, clients: int, error: BaseException) -> None:
        """Keep why a stack could not train. Which client it is shows when each trains by itself."""
        self._fault = clients, type(error).__name__, with_place(error, longest=160)

    def say_fault(self) -> None:
        """Say why a stack could not train, once one of its clients has trained by itself."""
        if self._fault is not None:
            text = "a stack of %d clients could not train, so each trains by itself (%s: %s)"
            self._say(text, *self._fault)
            self._fault = None

    def _say(self, text: str, *arguments: Any) -> None:
        """Log why clients train by themselves, once as a warning."""
        level, self._level = self._level, logging.DEBUG
        log.log(level, text, *arguments)

    def _member(self, request: FitRequest, trainer: ClientTrainer, data: FederatedData) -> Member:
        """Return a client whose algorithm has started its fit."""
        setup, view = self.setup, data.at(request.broadcast.round)
        loader = setup.loader_of(view, request)
        epochs = trainer.fit_loop.max_epochs or 1
        epoch_steps = epoch_batches(setup.trainer_kwargs, len(loader))
        steps = epochs * epoch_steps
        if (most := trainer.fit_loop.epoch_loop.max_steps) > 0:
            steps = min(steps, most)

        if not steps:
            raise RuntimeError("limit_train_batches leaves no batch")

        client, device = setup.view_of(request), trainer.strategy.root_device
        start = self.starts.of(request, device)
        own = request, client, loader, epoch_steps, steps
        if self.halves.trains_plainly:
            return Member(*own, start, [{} for _ in self.halves.parts])

        state = {name: start[name] for name in self._names}
        optimizer, _ = self._optimizers(request.broadcast.round)  # read, it takes no step
        self.seed("fit", request)  # an algorithm may draw where it starts a fit
        client.fit = fit = OneFit(
            trainer, self.model, loader, state, self._continues(request), [optimizer]
        )
        fit.is_private = bool(by_sample(request.broadcast.callbacks))
        with attached(self.model, trainer):
            abilities.begin_task(self.model, view.stage)
            w, helds = self.halves.start(client, state)
        return Member(*own, {**start, **w}, helds, fit)

    def _continues(self, request: FitRequest) -> bool:
        """Return whether the optimizer of a client continues from its last fit."""
        is_kept = self.setup.keep_optimizers and not request.adapts
        return bool(is_kept and request.memory.get("optimizers"))

    def _configured(self, model: LightningModule, round: int) -> tuple[Optimizer, list[Any]]:
        """Return the optimizer of a model, with the learning rates of a round, and schedulers."""
        decay = self.setup.lr_decay
        optimizer, schedulers = optimizer_of(model)
        for group in optimizer.param_groups:
            group["lr"] *= decay.factor(round) if decay else 1.0
        return optimizer, schedulers

    def _kind(self, member: Member, data: FederatedData) -> tuple[Any, ...]:
        """Return what fits of one stack have in common."""
        request = member.request
        round, decay = request.broadcast.round, self.setup.lr_decay
        leaves, structure = tree_flatten(list(member.helds) if member.fit else [])
        # Epochs that train other parameters, and steps of a scheduler, come together.
        has_pairs = self.halves.batches_per_step > 1
        together = self.halves.has_phases or has_pairs or self._has_schedulers
        return (
            repr(structure),  # torch 2.6 cannot hash it
            tuple((leaf.shape, leaf.dtype) for leaf in leaves),
            # The step of an optimizer that continues may depend on how many it has taken.
            past_of(request.memory.get("optimizers")),
            (member.epoch_steps, member.steps) if together else None,
            decay.factor(round) if decay else 1.0,
            data.at(round).stage,
        )

    def train(
        self, members: Sequence[Member], trainer: ClientTrainer, data: FederatedData
    ) -> list[TrainedFit | None]:
        """Train one stack, and return the fits, ``None`` for a client without a finite loss."""
        began = time.perf_counter()
        first = members[0].request
        view = data.at(first.broadcast.round)
        self.seed("stack", first)  # what is drawn, as for dropout, depends on who is in the stack
        model = self.model
        if view.stage is not None:
            model = copy.deepcopy(model)
            abilities.begin_task(model, view.stage)
        if self._recorder:
            self._recorder.begin(model, first.broadcast.round)
        tensors = self._tensors(model, [member.start for member in members])
        optimizer, schedulers = self._optimizer_of(model, tensors, members, trainer)
        keeps = self.setup.keep_optimizers and not first.adapts
        users = first.broadcast.callbacks, members, model, trainer, tensors, optimizer
        callbacks = MemberCallbacks(*users)
        memories: list[dict[str, Any]] = [{} for _ in members]

        def end(place: int, state: State) -> None:
            member = members[place]
            callbacks.end(place)
            if keeps:
                memories[place] = {"optimizers": [optimizer.state_dict(place)]}
            if member.fit:
                member.fit.state = state  # what its algorithm may measure now
                self.halves.end(member.client, state, steps.helds_of(place))
            callbacks.ended.add(place)

        batches, no_trainer = StackBatches(members, view, trainer), _NoTrainer(type(model).__name__)
        with callbacks.running(), attached(model, no_trainer):
            start = {name: value[0] for name, value in tensors.items()}
            by_samples = bool(callbacks.private)
            # Anew for each stack, because a model may use other layers in another round.
            known = self._recorder.used if self._recorder else {}
            if (used := known.get(by_samples)) is None:
                used = used_parameters(model, trainer, start, batches.first(), by_samples)
                known[by_samples] = used
            own = model, used, trainer, tensors, members, self.halves, optimizer
            steps = StackSteps(*own, schedulers, callbacks.private, self._recorder)
            batches.fills = _fills(steps, batches)
            ends = steps.run(batches, end)
            if no_trainer.error is not None:  # the step has caught it
                raise no_trainer.error
        self._state_check.check("in a fit", "client.memory")
        seconds = (time.perf_counter() - began) / len(members)
        fits: list[TrainedFit | None] = []
        for place, (member, metrics) in enumerate(zip(members, steps.metrics(), strict=True)):
            if not math.isfinite(metrics["loss"]):
                fits.append(None)  # it trains by itself, where its step may say why
                continue
            ended = member.steps, metrics, seconds, member.client, self.halves.measures
            epochs = math.ceil(member.steps / member.epoch_steps)
            fits.append(TrainedFit(ends[place], memories[place], *ended, epochs))
        return fits

    def _optimizer_of(
        self,
        model: LightningModule,
        tensors: State,
        members: Sequence[Member],
        trainer: ClientTrainer,
    ) -> tuple[TensorOptimizer, list[Any]]:
        """Return the optimizer of a stack, with the clients' kept states, and its schedulers."""
        first = members[0].request
        template, schedulers = self._configured(model, first.broadcast.round)
        template._opt_called = True  # type: ignore[attr-defined]  # schedulers warn otherwise
        names = {id(p): name for name, p in model.named_parameters()}
        trained = {name: tensors[name] for name, p in model.named_parameters() if p.requires_grad}
        optimizer = TensorOptimizer(template, names, trained, partial(clipped, trainer))
        if self._continues(first):
            optimizer.load([member.request.memory["optimizers"][0] for member in members])
        for member in members:
            if member.fit:
                member.fit.optimizers = [template]
        return optimizer, schedulers

    def seed(self, stream: str, request: FitRequest) -> None:
        """Seed what the fit of a request draws."""
        stream = f"{stream}/{request.repeat}" if request.repeat else stream
        seed_process(self.setup.seed, stream, request.broadcast.round, request.client)

    def _tensors(self, model: LightningModule, starts: Sequence[State]) -> dict[str, Tensor]:
        """Return all tensors of the models, each ``(clients, ...)``. Tied weights occur once."""
        own = chain(model.named_parameters(), model.named_buffers())
        return {
            name: stacked(
                [start.get(name, value.detach()) for start in starts], value.device
            ).contiguous()
            for name, value in own
        }


def _fills(steps: StackSteps, batches: StackBatches) -> bool:
    """Return whether smaller batches may be filled up, so that clients need fewer groups."""
    if steps.private:
        refuse_mixed_samples(steps, batches.mixed())
        return True
    sizes = {member.client.samples for member in steps.members}
    return len(sizes) > 1 and is_mean_over_samples(steps, batches.mixed())
