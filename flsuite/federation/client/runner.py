"""Runs fits: copy a client's state into the resident model, train, copy the state out.

A worker has one model and one Lightning Trainer, whatever the number of clients. A client is a
state dict and an index array.
"""

import copy
import logging
import time
import traceback
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from flsuite.aggregators.state_check import StateCheck
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.errors import FlsuiteError, one_line, with_place
from flsuite.common.lightning_internals import steps_taken
from flsuite.common.messages import (
    ClientContext,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
    OwnScores,
    ScoreRequest,
    TrainedFit,
    replaced,
)
from flsuite.common.random import seed_process
from flsuite.common.state import State, clone, load_
from flsuite.common.turns import together
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.callbacks import FitOptimizers, FitRecord
from flsuite.federation.client.conditions import not_plain
from flsuite.federation.client.devices import on_one_gpu
from flsuite.federation.client.entries import ResidentModel, entries_of
from flsuite.federation.client.faults import carry_out
from flsuite.federation.client.plain import PlainLoop
from flsuite.federation.client.profiler import ClientProfiler
from flsuite.federation.client.scorer import Scorer
from flsuite.federation.client.setup import StartStates, WorkerSetup, remedy_of
from flsuite.federation.client.stack import Stack
from flsuite.federation.client.stack_shares import StackShare, train_shares
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models import abilities
from flsuite.models.layers import to_channels_last

log = logging.getLogger(__name__)


class ClientRunner:
    """Runs the fits of one worker, one after another, on the same tensors.

    Args:
        setup: The setup shared by all workers.
        worker: Number of the worker, which determines its GPU if there are several.
    """

    def __init__(self, setup: WorkerSetup, worker: int = 0) -> None:
        self.setup = setup
        self.trainer_kwargs = on_one_gpu(setup.trainer_kwargs, worker)
        self._profiler: ClientProfiler | None = self.trainer_kwargs.get("profiler")
        self.model = setup.model
        if setup.channels_last:
            to_channels_last(self.model)
        self.entries = entries_of(setup.model, setup.uplink.aggregator, setup.batchnorm)
        self._resident = ResidentModel(self.model, self.entries.frozen)
        self._state_check = StateCheck(setup.uplink.aggregator)
        self._halves = setup.uplink.aggregator.halves
        self._record: FitRecord | None = None
        self._trainer: ClientTrainer | None = None
        self._plain: PlainLoop | None = None
        self._needs_lightning: str | None = None  # the reason, once known
        self._data: FederatedData | None = None
        self._starts = StartStates(setup, self.entries)
        self._stack = Stack(self._starts, setup) if setup.stack > 1 else None

    def run(self, request: FitRequest) -> Outcome:
        """Train one client.

        An error of one client becomes a :class:`ClientFailure`. The update stays on the device of
        the model, and shares memory with it until the next fit. With transforms, it is on the CPU.

        Raises:
            FlsuiteError: If no client can train with the settings of the run.
        """
        self._record = None
        if request.trained is None or request.trained.measures:  # else the model is not needed
            self._resident.restore()
        try:
            result = self._fit(request)
            if self._stack is not None and request.trained is None:
                self._stack.say_fault()
            return result if request.fault is None else carry_out(request.fault, result)
        except (FlsuiteError, BdbQuit):  # who leaves the debugger ends the run
            raise
        except (Exception, SystemExit) as error:  # a library may call exit()
            self._trainer = None  # an exception may leave the Trainer in any state
            reason = f"{type(error).__name__}: {with_place(error, longest=300)}{remedy_of(error)}"
            has_stepped = bool(request.trained or (self._record and self._record.losses))
            return request.failure(
                reason, traceback.format_exc(), before_first_step=not has_stepped
            )
        finally:
            self._resident.release()

    def trained_together(self, requests: Sequence[FitRequest]) -> list[FitRequest]:
        """Train clients in stacks, and return all requests, with the outcomes of those that could.

        They are all fits, or all adaptations of the final model. Without stacks, nothing is
        trained.
        """
        if self._stack is None:
            return list(requests)
        trainer, data = self._rewound_trainer(requests[0].adapts)
        self._resident.restore()
        try:
            members = self._stack.members_of(requests, trainer, data)
            fits = together(StackShare(self._stack, members, trainer, data), train_shares)
        finally:
            self._resident.release()
        return [replaced(one, trained=fits.get(one.number, one.trained)) for one in requests]

    def score(self, request: ScoreRequest) -> OwnScores | ClientFailure | None:
        """Score one client's own model.

        Returns ``None`` if there is no such split, and a failure after an error.
        """
        self._resident.restore()
        try:
            trainer, _ = self._rewound_trainer()
            data = self.setup.data.at(request.broadcast.round)
            device, precision = trainer.strategy.root_device, trainer.precision_plugin
            scorer = Scorer(
                self.model,
                data,
                device,
                precision.forward_context,
                seed=self.setup.seed,
                trainer_kwargs=self.trainer_kwargs,
                attack=self.setup.attack,
            )
            state = {**self.setup.initial, **request.broadcast.state, **request.own}
            return scorer.own(request.client, state, request.split, request.details)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {one_line(error, 300)}"
            return request.failure(reason, traceback.format_exc())

    def _fit(self, request: FitRequest) -> ClientResult:
        started = time.perf_counter()
        setup, broadcast = self.setup, request.broadcast
        view = setup.data.at(broadcast.round)
        client, trained = setup.view_of(request), request.trained
        if trained is not None and not trained.measures:
            return self._result(request, client, started - trained.seconds, trained, trained.state)

        # Only an initialized device can be seeded.
        device = self._started_trainer().strategy.root_device
        # Before any draw, so the fit depends only on the seed, round, client and repeat.
        stream = f"fit/{request.repeat}" if request.repeat else "fit"
        seed_process(setup.seed, stream, client.round, client.id)
        resident = self.model.state_dict()
        load_(resident, self._starts.of(request, device))
        self._resident.mark()
        abilities.begin_task(self.model, view.stage)
        trainer, data = self._rewound_trainer(request.adapts)
        epochs = trainer.fit_loop.max_epochs or 1
        loader = setup.loader_of(data.at(broadcast.round), request, epochs)
        if trained is None:
            trained = self._trained(request, client, trainer, loader)
        else:
            own = trained.memory.get("model", {})
            load_(resident, {**trained.state, **own})
            trainer.strategy.connect(self.model)
            trainer.strategy.model_to_device()
            loader.epoch = trained.epochs or epochs  # as after the fit
        if self._halves.measures and not request.adapts:
            self._halves.measure(client, self.model, loader)
        return self._result(
            request, client, started - trained.seconds, trained, self.model.state_dict()
        )

    def _trained(
        self,
        request: FitRequest,
        client: ClientContext,
        trainer: ClientTrainer,
        loader: TrainLoader,
    ) -> TrainedFit:
        """Train the model, and return what the training leaves, without its weights."""
        setup, decay = self.setup, self.setup.lr_decay
        keeps = setup.keep_optimizers and not request.adapts
        kept = request.memory.get("optimizers") if keeps else None
        optimizers = FitOptimizers(decay.factor(client.round) if decay else None, kept, keeps)
        record = FitRecord(None if request.adapts else self._halves, client, bool(kept))
        self._record = record
        users = copy.deepcopy(list(request.broadcast.callbacks))
        # The learning rate is set before the user's callbacks see it. The algorithm comes after
        # them, to change the final gradient.
        callbacks = [optimizers, *users, record]
        if plain := self._plain_loop(trainer, users, loader):
            logged = plain.fit(loader, callbacks)
        else:
            trainer.callbacks = callbacks  # type: ignore[attr-defined]
            if profiler := self._profiler:
                profiler.begin()
            trainer.fit(self.model, loader)
            logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        self._resident.check()
        self._state_check.check("in a fit", "client.memory")
        steps = steps_taken(trainer) - record.skipped
        if steps and self.model.automatic_optimization and not record.losses:
            raise RuntimeError(
                f"training_step of {type(self.model).__name__} returned no loss for any batch, so "
                "nothing was trained; return the loss, or set automatic_optimization to False"
            )
        memory = {"optimizers": optimizers.states} if keeps else {}
        numbers = _training_numbers(logged, record, steps)
        return TrainedFit({}, memory, steps, numbers, seconds=0.0, epochs=loader.epoch)

    def _plain_loop(
        self, trainer: ClientTrainer, callbacks: Sequence[Callback], loader: TrainLoader
    ) -> PlainLoop | None:
        """Return the short loop, or ``None`` if clients need Lightning's own."""
        if self._needs_lightning is None:
            self._needs_lightning = not_plain(trainer, self.model, callbacks, loader) or ""
            if self._needs_lightning:
                log.info("clients train in Lightning's own loop: %s", self._needs_lightning)
        if self._needs_lightning:
            return None
        if self._plain is None or self._plain.trainer is not trainer:
            self._plain = PlainLoop(trainer, self.model)
        return self._plain

    def _result(
        self,
        request: FitRequest,
        client: ClientContext,
        started: float,
        trained: TrainedFit,
        state: State,
    ) -> ClientResult:
        """Return the outcome of a fit: the update and the client's memory.

        Args:
            request: The request.
            client: The client's view of the round.
            started: Start of the fit, in seconds of ``time.perf_counter``.
            trained: The outcome of the training, without its state.
            state: All entries of the trained model.
        """
        setup, broadcast = self.setup, request.broadcast
        shared, private = ({name: state[name] for name in part} for part in self.entries[:2])
        if setup.uplink.pipeline.transforms:  # they compute on the CPU
            shared = clone(shared)
        elif setup.uplink.masks:  # a contribution that is kept to be masked may be a part of it
            shared = clone(shared, device=None)
        update = ClientUpdate(
            client=client.id,
            round=client.round,
            samples=client.samples,
            steps=trained.steps,
            class_counts=client.class_counts,
            state=shared,
            extras=client.extras,
            metrics={**trained.metrics, **_numbers(client.metrics)},
            bytes_down=broadcast.bytes,
            number=request.number,
        )
        if request.adapts:  # it is scored as it is
            return ClientResult(update, {"model": clone(private)})
        notes = copy.deepcopy(request.memory.get("transforms", {}))
        at = client.id, client.round, setup.seed, request.repeat
        fit = FitView(*at, broadcast.extras, metrics=update.metrics)
        packed, unmasked = setup.uplink.pack(update, broadcast.state, fit, notes)
        packed.seconds = time.perf_counter() - started
        memory = {
            "model": clone(private),
            "objective": client.memory,
            "optimizers": trained.memory.get("optimizers"),
            "transforms": {place: own for place, own in notes.items() if own},
            "unmasked": unmasked,
        }
        # Without empty parts, which a checkpoint does not need.
        own = {k: v for k, v in memory.items() if v}
        profile = self._profiler.taken(client.id) if self._profiler else {}
        return ClientResult(packed, own, trained.metrics, trained.epochs, profile)

    def _rewound_trainer(self, epochs: int = 0) -> tuple[ClientTrainer, FederatedData]:
        """Return a Trainer rewound for some epochs, or for its own, and the data on its device.

        The Trainer is reused unless users' callbacks may have changed it in unknown ways. In that
        case, every fit has a new Trainer, so a fit never depends on earlier fits of its worker.
        """
        if self._needs_lightning:
            self._trainer = None
        trainer = self._started_trainer()
        if self._data is None:
            self._data = self.setup.data.to(trainer.strategy.root_device)
        trainer.rewind(abilities.extra_epochs(self.model), epochs or None)
        return trainer, self._data

    def _started_trainer(self) -> ClientTrainer:
        """Return the Trainer with its device initialized. Create it if necessary."""
        if self._trainer is None:
            with isolate_rng():  # the fit may already be seeded
                self._trainer = ClientTrainer(**self.trainer_kwargs)
            if self._trainer.strategy.root_device.type == "cuda":
                torch.cuda.init()
        return self._trainer


def _training_numbers(
    logged: Mapping[str, float], record: FitRecord, steps: int
) -> dict[str, float]:
    """Return the fit's measurements and the model's logged metrics."""
    numbers = {**record.numbers(), **logged}
    if steps and not record.losses:  # under manual optimization, steps need not return a loss
        del numbers["loss"]
        numbers |= {"loss": logged["train_loss"]} if "train_loss" in logged else {}
    return numbers


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return a client's metrics as numbers.

    Raises:
        TypeError: If one is not a number.
    """
    for name, value in metrics.items():
        try:
            float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"client.metrics[{name!r}] must be a number, got {value!r}") from error
    return {name: float(value) for name, value in metrics.items()}
