"""Trains many clients as one batched program: their tensors lie along a first axis."""

import copy
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from flsuite.aggregators.losses import step_loss
from flsuite.aggregators.rules.after_fit import AfterFit
from flsuite.aggregators.second_model import optimizer_for
from flsuite.client.entries import Entries
from flsuite.client.fits import StackedFit, context_of, start_of
from flsuite.client.setup import WorkerSetup
from flsuite.client.stackable import can_stack, optimizer_of, stackable_callbacks
from flsuite.client.trainer import ClientTrainer
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.data.map_style import StoredSplit
from flsuite.errors import one_line
from flsuite.lightning_internals import attached
from flsuite.messages import ClientContext, FitRequest, TrainedFit
from flsuite.models import declarations
from flsuite.random import seed_process
from flsuite.state import State, clone

log = logging.getLogger(__name__)


@dataclass
class _Member:
    """One client of a stack.

    Attributes:
        client: Its view of the round.
        loader: Its batches.
        epochs: Epochs of its fit.
        callbacks: What its algorithm does to its gradients.
        module: A model whose parameters are this client's part of the stack, for the callbacks.
        optimizer: The model's optimizer over them, for the callbacks. It takes no step.
        trainer: The Trainer that its callbacks see.
    """

    client: ClientContext
    loader: TrainLoader
    epochs: int
    callbacks: list[Callback] = field(default_factory=list)
    module: LightningModule = field(init=False)
    optimizer: Optimizer = field(init=False)
    trainer: Any = field(init=False)

    @property
    def steps(self) -> int:
        """Return the number of steps of the fit."""
        return self.epochs * len(self.loader)


class _TrainerOfOne:
    """The Trainer of the worker, with one client's optimizer and batches."""

    def __init__(self, trainer: ClientTrainer, optimizer: Optimizer, loader: TrainLoader) -> None:
        self._trainer = trainer
        self.optimizers, self.train_dataloader = [optimizer], loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


class _NoTrainer:
    """Refuses a training step that reads its Trainer, because the clients' epochs differ."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self._model} reads trainer.{name}, which differs between clients")


class Stack:
    """Trains the fits of several clients at the same time.

    Each client takes exactly the steps that it takes alone, on the same batches. Batched kernels
    round differently, so the weights differ in the last digits.

    Args:
        model: The structure. Its weights are not used.
        entries: The ownership of its entries.
        setup: The setup of the worker.
    """

    def __init__(self, model: LightningModule, entries: Entries, setup: WorkerSetup) -> None:
        self.entries, self.setup = entries, setup
        self.model = self._original = model
        self._modules: list[LightningModule] = []
        self._level = logging.WARNING

    def train_all(
        self, requests: Sequence[FitRequest], trainer: ClientTrainer, data: FederatedData
    ) -> dict[int, StackedFit]:
        """Train the clients of a job that can be stacked, and return their fits by number.

        Clients of a stack that cannot train are left out, to train by themselves.

        Args:
            requests: Fits of one round, with as many epochs each.
            trainer: The Trainer, rewound for them.
            data: The samples, on its device.
        """
        able = [request for request in requests if can_stack(self.setup, request)]
        fits: dict[int, StackedFit] = {}
        for first in range(0, len(able), self.setup.stack):
            members = able[first : first + self.setup.stack]
            if len(members) < 2:  # a stack of one would only be slower
                continue
            try:
                fits |= self.train(members, trainer, data)
            except Exception as error:
                # Which client it is shows when each trains by itself.
                level, self._level = self._level, logging.DEBUG  # said once
                names = type(error).__name__, one_line(error, longest=160)
                text = "a stack of %d clients could not train, so each trains by itself (%s: %s)"
                log.log(level, text, len(members), *names)
        return fits

    def train(
        self, requests: Sequence[FitRequest], trainer: ClientTrainer, data: FederatedData
    ) -> dict[int, StackedFit]:
        """Train one stack. The arguments are those of :meth:`train_all`."""
        began = time.perf_counter()
        setup, first = self.setup, requests[0]
        view = data.at(first.broadcast.round)
        # What a model draws in its steps, as for dropout, depends on who is in the stack.
        seed_process(setup.seed, "stack", first.broadcast.round, first.client)
        # A copy, because a step may leave a tensor of the transforms in the model.
        self.model = copy.deepcopy(self._original).to(trainer.strategy.root_device).train()
        if view.stage is not None:
            declarations.begin_task(self.model, view.stage.task, view.stage.seen, view.stage.past)
            self._modules = []  # copies of the model in its last task

        starts = [start_of(setup, self.entries, request) for request in requests]
        tensors = self._tensors(starts, trainer.strategy.root_device)
        members = [self._member(i, r, view, trainer, tensors) for i, r in enumerate(requests)]
        with attached(self.model, _NoTrainer(type(self.model).__name__)):
            ends = _Steps(self, trainer, view, tensors, members).run()
        seconds = (time.perf_counter() - began) / len(members)
        after = setup.aggregator.callbacks(members[0].client)
        measures = not first.adapts and any(isinstance(c, AfterFit) for c in after)
        return {
            request.number: StackedFit(
                member.client, TrainedFit(state, {}, member.steps, metrics, seconds), measures
            )
            for request, member, (state, metrics) in zip(requests, members, ends, strict=True)
        }

    def used(self, trainer: ClientTrainer, start: State, batch: Any, index: int) -> list[str]:
        """Return the trainable parameters that the loss depends on. The others take no step."""
        # Anew for each stack, because a model may use other layers in another task or round.
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        leaves = {k: v.detach().clone() for k, v in start.items()}
        wanted = [leaves[name].requires_grad_() for name in names]
        with torch.random.fork_rng(), trainer.precision_plugin.train_step_context():
            loss = step_loss(self.model, leaves, batch, index)
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [k for k, g in zip(names, gradients, strict=True) if g is not None]

    def _tensors(self, starts: Sequence[State], device: torch.device) -> dict[str, Tensor]:
        """Return all tensors of the models, each ``(clients, ...)``. Tied weights occur once."""
        stacked = {}
        for name, own in chain(self.model.named_parameters(), self.model.named_buffers()):
            parts = [start.get(name, own.detach()) for start in starts]
            is_same = all(part is parts[0] for part in parts)
            whole = parts[0].expand(len(parts), *own.shape) if is_same else torch.stack(parts)
            stacked[name] = whole.to(device).contiguous()
        return stacked

    def _member(
        self,
        place: int,
        request: FitRequest,
        view: FederatedData,
        trainer: ClientTrainer,
        tensors: Mapping[str, Tensor],
    ) -> _Member:
        setup, round = self.setup, request.broadcast.round
        client = context_of(setup, request)
        loader = TrainLoader(view, client.id, setup.seed, round, request.batches, request.repeat)
        member = _Member(client, loader, trainer.fit_loop.max_epochs or 1)
        member.callbacks = [] if request.adapts else stackable_callbacks(setup, client) or []
        if member.callbacks or place == 0:  # the first one's optimizer is the stack's
            self._give_model(member, place, trainer, tensors)
        return member

    def _give_model(
        self, member: _Member, place: int, trainer: ClientTrainer, tensors: Mapping[str, Tensor]
    ) -> None:
        """Give a client a model whose tensors are its part of the stack."""
        while len(self._modules) <= place:
            self._modules.append(copy.deepcopy(self.model))
        member.module = module = self._modules[place]
        for name, own in chain(module.named_parameters(), module.named_buffers()):
            own.data, own.grad = tensors[name][place], None

        member.optimizer, decay = optimizer_of(module), self.setup.lr_decay
        for group in member.optimizer.param_groups:
            group["lr"] *= decay.factor(member.client.round) if decay else 1.0
        member.trainer = _TrainerOfOne(trainer, member.optimizer, member.loader)


class _Steps:
    """The steps of one stack.

    Args:
        stack: The stack.
        trainer: Gives the device, the precision and the clipping.
        view: The samples in this round.
        tensors: All tensors of the models, each ``(clients, ...)``. They change in place.
        members: The clients.
    """

    def __init__(
        self,
        stack: Stack,
        trainer: ClientTrainer,
        view: FederatedData,
        tensors: dict[str, Tensor],
        members: list[_Member],
    ) -> None:
        self.model, self.trainer, self.view, self.members = stack.model, trainer, view, members
        self.tensors, self.device = tensors, trainer.strategy.root_device
        # The batches of a step are read at once, unless each has randomness of its own.
        self.reads_rows = view.augment is None and not isinstance(view.train, StoredSplit)

        own = dict(members[0].module.named_parameters())
        groups = members[0].optimizer.param_groups
        stepping = {id(p) for group in groups for p in group["params"]}
        some = self._read([next(self._batches(copy.copy(members[0].loader), 1))])
        used = stack.used(trainer, {k: v[0] for k, v in tensors.items()}, _first(some), 0)
        names = [name for name in used if id(own[name]) in stepping]
        self.parameters = {name: tensors[name] for name in names}
        self.others = {name: value for name, value in tensors.items() if name not in names}
        # Gradients of these show whether every step uses the same parameters.
        able = [k for k, p in own.items() if p.requires_grad and id(p) in stepping]
        self.unused = [name for name in able if name not in self.parameters]
        self.buffers = [n for n, _ in self.model.named_buffers()]
        self.gradients = {k: torch.zeros_like(v) for k, v in self.parameters.items()}
        self.losses = torch.zeros(len(members), device=self.device)
        self.logged: list[dict[str, float]] = [{} for _ in members]

        replaced = {id(own[name]): value for name, value in self.parameters.items()}
        self.optimizer = optimizer_for(members[0].optimizer, replaced)
        firsts = {id(p): name for name, p in self.model.named_parameters()}
        tied = dict(self.model.named_parameters(remove_duplicate=False))
        entries = self.model.state_dict()
        self.entries = {k: firsts[id(tied[k])] if k in tied else k for k in entries}

    def run(self) -> list[tuple[State, dict[str, float]]]:
        """Take all steps, and return each client's state and metrics."""
        batches = [self._batches(member.loader, member.epochs) for member in self.members]
        ends: list[State] = [{} for _ in self.members]
        for place, member in enumerate(self.members):
            for name, parameter in member.module.named_parameters() if member.callbacks else ():
                if name in self.gradients:
                    parameter.grad = self.gradients[name][place]
            for callback in member.callbacks:
                callback.on_fit_start(member.trainer, member.module)
                callback.on_train_start(member.trainer, member.module)

        for step in range(max(member.steps for member in self.members)):
            left = [i for i, member in enumerate(self.members) if step < member.steps]
            self._step(step, {i: next(batches[i]) for i in left})
            for i in left:
                if step + 1 == self.members[i].steps:
                    ends[i] = self._end(i)
        return [(ends[i], self._metrics(i)) for i in range(len(ends))]

    def _step(self, step: int, batches: Mapping[int, Any]) -> None:
        """Take one step of the clients that have a batch left.

        The others move on too, without an effect: their results have been read.
        """
        of_size: dict[Any, list[int]] = {}
        for place, batch in batches.items():
            parts = [batch] if self.reads_rows else tree_flatten(batch)[0]
            of_size.setdefault(tuple(part.shape for part in parts), []).append(place)
        for places in of_size.values():
            self._add_gradients(step, places, self._read([batches[i] for i in places]))

        for place in batches:
            member = self.members[place]
            for callback in member.callbacks:
                callback.on_before_optimizer_step(member.trainer, member.module, member.optimizer)
        self._clip()
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]
        self.optimizer.step()

    def _add_gradients(self, step: int, places: list[int], batch: Any) -> None:
        """Compute the gradients of the clients at these places, on batches of the same size."""
        is_all = len(places) == len(self.members)
        at: Any = slice(None) if is_all else torch.tensor(places, device=self.device)
        leaves = {k: self.tensors[k][at].detach() for k in (*self.parameters, *self.unused)}
        wanted = [leaf.requires_grad_() for leaf in leaves.values()]
        others = {name: value[at] for name, value in self.others.items() if name not in leaves}
        together = torch.vmap(partial(self._loss, step=step), randomness="different")
        losses, buffers, logged = together(leaves, others, batch)

        # A client's loss depends on its own parameters alone, so these are its gradients.
        gradients = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        used = {k: g for k, g in zip(leaves, gradients, strict=True) if g is not None}
        if used.keys() != self.parameters.keys():
            raise RuntimeError("the loss depends on other parameters in some of the steps")
        for name, gradient in used.items():
            self.gradients[name][at] = gradient
        for name, value in buffers.items():
            self.others[name][at] = value
        self.losses[at] += losses.detach().float()
        self._log(step, places, logged)

    def _loss(
        self, parameters: State, others: State, batch: Any, step: int
    ) -> tuple[Tensor, State, State]:
        """Return one client's loss, its buffers after the step, and what it logs."""
        buffers = {name: others[name].clone() for name in self.buffers}
        logged: State = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            logged[name] = torch.as_tensor(value, device=self.device).detach().float()

        tensors = {**others, **buffers, **parameters}
        # As in Lightning, the backward pass is outside.
        with self.trainer.precision_plugin.train_step_context():
            # A cached cast would belong to one level of the transforms.
            torch.set_autocast_cache_enabled(False)
            loss = step_loss(self.model, tensors, batch, step, log, ends := dict[str, Tensor]())
        return loss, {name: ends[name].detach() for name in self.buffers}, logged

    def _log(self, step: int, places: list[int], logged: Mapping[str, Tensor]) -> None:
        """Add what the clients log to the means over their last epochs."""
        for name, values in logged.items():
            for place, value in zip(places, values.tolist(), strict=True):
                member, means = self.members[place], self.logged[place]
                batches = len(member.loader)
                if step >= member.steps - batches:
                    means[name] = means.get(name, 0.0) + value / batches

    def _clip(self) -> None:
        """Clip each client's gradients by their own norm, as the Trainer does."""
        if not (limit := self.trainer.gradient_clip_val):
            return
        if self.trainer.gradient_clip_algorithm == "value":
            for gradient in self.gradients.values():
                gradient.clamp_(-float(limit), float(limit))
            return
        norms = [gradient.flatten(1).norm(dim=1) for gradient in self.gradients.values()]
        factors = (float(limit) / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in self.gradients.values():
            gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))

    def _end(self, place: int) -> State:
        """End a client's fit, and return its state, under all names of tied weights."""
        member = self.members[place]
        for callback in member.callbacks:
            callback.on_train_end(member.trainer, member.module)
        return clone({name: self.tensors[first][place] for name, first in self.entries.items()})

    def _metrics(self, place: int) -> dict[str, float]:
        loss = float(self.losses[place]) / self.members[place].steps
        return {"loss": loss, **self.logged[place]}

    def _batches(self, loader: TrainLoader, epochs: int) -> Iterator[Any]:
        """Yield a client's batches, or only their rows where they are read at once."""
        for _ in range(epochs):
            yield from loader.rows() if self.reads_rows else loader

    def _read(self, batches: Sequence[Any]) -> Any:
        """Return batches of the same size as one, ``(clients, batch, ...)``."""
        if not self.reads_rows:
            moved = map(self.trainer.strategy.batch_to_device, batches)
            return tree_map(lambda *parts: torch.stack(parts), *moved)
        (batch,) = self.view.batches_of(self.view.train, [torch.cat(list(batches))])
        return tree_map(lambda part: part.unflatten(0, (len(batches), -1)), batch)


def _first(batch: Any) -> Any:
    """Return the batch of the first client of a stack."""
    return tree_map(lambda part: part[0], batch)
