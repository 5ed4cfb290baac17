"""Trains many clients as one batched program: their tensors lie along a first axis."""

import copy
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from flsuite.aggregators.state_check import StateCheck
from flsuite.common.errors import with_place
from flsuite.common.lightning_internals import attached
from flsuite.common.messages import FitRequest, TrainedFit
from flsuite.common.random import seed_process
from flsuite.common.state import State
from flsuite.data.federated import FederatedData
from flsuite.federation.client.callbacks import KeepOptimizers
from flsuite.federation.client.devices import keep_freed_memory
from flsuite.federation.client.setup import StartStates, WorkerSetup
from flsuite.federation.client.stack_batches import StackBatches
from flsuite.federation.client.stack_member import Member, TrainerOfOne, callbacks_of, stacked
from flsuite.federation.client.stack_samples import is_mean_over_samples, refuse_mixed_samples
from flsuite.federation.client.stack_steps import StackSteps
from flsuite.federation.client.stack_trial import used_parameters
from flsuite.federation.client.stackable import (
    Candidate,
    by_sample,
    candidate,
    optimizer_of,
    phases,
)
from flsuite.federation.client.stacked_optimizer import past_of
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models import abilities

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
        self._modules: list[LightningModule] = []
        self._state_check = StateCheck(setup.uplink.aggregator)
        self._level = logging.WARNING
        keep_freed_memory()

    def train_all(
        self, requests: Sequence[FitRequest], trainer: ClientTrainer, data: FederatedData
    ) -> list[FitRequest]:
        """Train the clients of a job that can be stacked, and return all requests.

        Those of trained clients have the outcome. The others still train by themselves.

        Args:
            requests: Fits with as many epochs each, of one round or in flight at one time.
            trainer: The Trainer, rewound for them.
            data: The samples, on its device.
        """
        alike: dict[Any, list[Candidate]] = {}
        self._seed(requests[0])  # an objective may draw where it makes callbacks
        for request in requests:
            try:
                one = candidate(self.setup, request)
            except (Exception, SystemExit):  # its fit by itself says why
                continue
            if one is not None:
                alike.setdefault(self._kind(one, data), []).append(one)
        fits: dict[int, TrainedFit] = {}
        most = self.setup.stack
        stacks = (ones[i : i + most] for ones in alike.values() for i in range(0, len(ones), most))
        for members in stacks:
            if len(members) < 2:  # a stack of one would only be slower
                continue
            try:
                fits |= self._train(members, trainer, data)
            except (Exception, SystemExit) as error:
                # Which client it is shows when each trains by itself.
                self._modules = []  # a callback may have left hooks in them
                level, self._level = self._level, logging.DEBUG  # said once
                names = type(error).__name__, with_place(error, longest=160)
                text = "a stack of %d clients could not train, so each trains by itself (%s: %s)"
                log.log(level, text, len(members), *names)
        return [replace(one, trained=fits.get(one.number, one.trained)) for one in requests]

    def _kind(self, one: Candidate, data: FederatedData) -> tuple[Any, ...]:
        """Return what fits of one stack have in common."""
        request = one.request
        # Clients share the callbacks of the user.
        callbacks = [*request.broadcast.callbacks, *one.own]
        round, decay = request.broadcast.round, self.setup.lr_decay
        view, steps = data.at(round), None
        if phases(callbacks):  # epochs that train other parameters begin together
            steps = len(self.setup.loader_of(view, request))
        return (
            *map(type, callbacks),  # MOON's do less in their first fit
            # The step of an optimizer that goes on may depend on how many it has taken.
            past_of(request.memory.get("optimizers")),
            steps,
            decay.factor(round) if decay else 1.0,
            view.stage,
        )

    def _train(
        self, candidates: Sequence[Candidate], trainer: ClientTrainer, data: FederatedData
    ) -> dict[int, TrainedFit]:
        """Train one stack, and return the fits of clients with a finite loss."""
        began = time.perf_counter()
        requests = [one.request for one in candidates]
        setup, first = self.setup, requests[0]
        view = data.at(first.broadcast.round)
        self._seed(first)
        # A copy, because a step may leave a tensor of the transforms in the model.
        self.model = copy.deepcopy(setup.model).to(trainer.strategy.root_device)
        if view.stage is not None:
            abilities.begin_task(self.model, view.stage)
            self._modules = []  # copies of the model in its last task

        device = trainer.strategy.root_device
        starts = [self.starts.of(request, device) for request in requests]
        tensors = self._tensors(starts, device)
        members = [self._member(i, c, view, trainer, tensors) for i, c in enumerate(candidates)]
        batches = StackBatches(members, view, trainer)
        trainer_of_all = _NoTrainer(type(self.model).__name__)
        with attached(self.model, trainer_of_all):
            start = {name: value[0] for name, value in tensors.items()}
            reads_samples = by_sample(members[0].callbacks)
            # Anew for each stack, because a model may use other layers in another task or round.
            used = used_parameters(self.model, trainer, start, batches.first(), reads_samples)
            with _told_of_errors(members):
                steps = StackSteps(self.model, used, trainer, tensors, members)
                if steps.by_sample:
                    batches.fills = True
                    refuse_mixed_samples(steps, batches.mixed())
                elif len({member.client.samples for member in members}) > 1:
                    batches.fills = is_mean_over_samples(steps, batches.mixed())
                ends = steps.run(batches)
                if trainer_of_all.error is not None:  # the step has caught it
                    raise trainer_of_all.error
        self._state_check.check("in a fit", "client.memory")
        seconds = (time.perf_counter() - began) / len(members)
        fits = {}
        for request, member, (state, metrics) in zip(requests, members, ends, strict=True):
            if not math.isfinite(metrics["loss"]):
                continue  # by itself, its step may say why
            keepers = callbacks_of([member], KeepOptimizers)
            kept = {"optimizers": keepers[0].states} if keepers else {}
            ended = member.steps, metrics, seconds, member.client, member.measures
            fits[request.number] = TrainedFit(state, kept, *ended)
        return fits

    def _seed(self, first: FitRequest) -> None:
        """Seed what a stack draws, as for dropout. It depends on who is in the stack."""
        stream = f"stack/{first.repeat}" if first.repeat else "stack"
        seed_process(self.setup.seed, stream, first.broadcast.round, first.client)

    def _tensors(self, starts: Sequence[State], device: torch.device) -> dict[str, Tensor]:
        """Return all tensors of the models, each ``(clients, ...)``. Tied weights occur once."""
        own = chain(self.model.named_parameters(), self.model.named_buffers())
        # On the device first, where what is the same for all clients is copied once.
        return {
            name: stacked([s.get(name, value.detach()).to(device) for s in starts]).contiguous()
            for name, value in own
        }

    def _member(
        self,
        place: int,
        one: Candidate,
        view: FederatedData,
        trainer: ClientTrainer,
        tensors: Mapping[str, Tensor],
    ) -> Member:
        setup, request, client = self.setup, one.request, one.client
        loader = setup.loader_of(view, request)
        callbacks: list[Callback] = copy.deepcopy(list(request.broadcast.callbacks))
        if setup.keep_optimizers and not request.adapts:
            callbacks.append(KeepOptimizers(request.memory.get("optimizers")))
        callbacks += one.own
        epochs = trainer.fit_loop.max_epochs or 1
        member = Member(client, loader, epochs, callbacks, one.measures)
        if member.callbacks or place == 0:  # the first one's optimizer is the stack's
            self._give_model(member, place, trainer, tensors)
        return member

    def _give_model(
        self, member: Member, place: int, trainer: ClientTrainer, tensors: Mapping[str, Tensor]
    ) -> None:
        """Give a client a model whose tensors are its part of the stack."""
        while len(self._modules) <= place:
            self._modules.append(copy.deepcopy(self.model))
        member.module = module = self._modules[place]
        for name, own in chain(module.named_parameters(), module.named_buffers()):
            own.data, own.grad = tensors[name][place], None
        for own, original in zip(module.parameters(), self.model.parameters(), strict=True):
            own.requires_grad_(original.requires_grad)  # the last fit may have frozen it

        member.optimizer, decay = optimizer_of(module), self.setup.lr_decay
        for group in member.optimizer.param_groups:
            group["lr"] *= decay.factor(member.client.round) if decay else 1.0
        member.trainer = module.trainer = TrainerOfOne(trainer, member)  # type: ignore[assignment]


@contextmanager
def _told_of_errors(members: Sequence[Member]) -> Iterator[None]:
    """Call ``on_exception`` of the callbacks, as a fit does: some undo what they have done."""
    try:
        yield
    except Exception as error:
        for member in (one for one in members if not one.has_ended):
            for callback in member.callbacks:
                callback.on_exception(member.trainer, member.module, error)
        raise
