"""One client's fit: swap its state in, train, swap it out.

A worker has one model and one Lightning Trainer, whatever the number of clients. A client is a state dict and an index
array; its tensors are copied into the resident ones.
"""

import copy
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from flsuite.aggregators import Aggregator
from flsuite.client.lr_decay import LRDecay
from flsuite.client.trainer import ClientTrainer
from flsuite.data.federated import FederatedData
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext, ClientFailure, ClientResult, ClientUpdate, FitRequest
from flsuite.models.base import ClientModel
from flsuite.random import seed_process
from flsuite.state import State, clone, load_, nbytes, split

__all__ = ["Buffers", "ClientRunner", "WorkerSetup", "buffer_names", "private_patterns"]

Buffers = Literal["average", "local", "reset"]


@dataclass
class WorkerSetup:
    """Everything a worker needs to train any client: sent once.

    Attributes:
        initial: What a fit starts from where neither server nor client says: see :class:`~flsuite.server.federation.Federation`.
        trainer_kwargs: Arguments of the per-client Lightning Trainer.
        callbacks: The user's own Lightning callbacks; every fit starts from a fresh copy.
        buffers: What becomes of buffers (BatchNorm statistics): ``average`` travels and is averaged like a weight;
            ``local`` stays with the client; ``reset`` travels, but every fit starts from the initial values.
        keep_optimizers: Whether a client's optimizer state lives on from one of its rounds to the next.
        lr_decay: What becomes of the learning rates from round to round.
    """

    model: ClientModel
    data: FederatedData
    aggregator: Aggregator
    seed: int
    initial: State
    trainer_kwargs: dict[str, Any]
    callbacks: list[Callback] = field(default_factory=list)
    buffers: Buffers = "average"
    keep_optimizers: bool = False
    channels_last: bool = True
    lr_decay: LRDecay | None = None


def private_patterns(model: ClientModel, aggregator: Aggregator, buffers: Buffers) -> list[str]:
    """Which entries stay with a client: what the model keeps, what the algorithm keeps, and local buffers."""
    if aggregator.pooled:
        return []
    return [
        *model.private,
        *aggregator.private,
        *(buffer_names(model) if buffers == "local" else ()),
    ]


class ClientRunner:
    """Carries out the fits of one worker, one after another, on the same tensors."""

    def __init__(self, job: WorkerSetup) -> None:
        self.job = job
        self.model = job.model
        if job.channels_last:
            self.model.to_channels_last()
        self.private = private_patterns(job.model, job.aggregator, job.buffers)
        self.buffers = buffer_names(self.model)
        self._trainer: ClientTrainer | None = None
        self._data: FederatedData | None = None

    def run(self, work: FitRequest) -> ClientResult | ClientFailure:
        """Train one client. Whatever goes wrong inside is a :class:`ClientFailure`, not an exception."""
        try:
            return self._run(work)
        except FlsuiteError:
            raise  # a setting that no client can train with: the run's error, not this client's
        except Exception as error:
            self._trainer = None  # what an exception leaves of a Trainer is not to be trusted
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            return ClientFailure(
                work.task.client, work.broadcast.round, reason, traceback.format_exc()
            )

    def _run(self, work: FitRequest) -> ClientResult:
        started = time.perf_counter()
        job, task, broadcast = self.job, work.task, work.broadcast
        trainer = self._rewound_trainer()
        assert self._data is not None
        data = self._data.at(broadcast.round)
        client = ClientContext(
            id=task.client,
            round=broadcast.round,
            samples=data.samples(task.client),
            class_counts=job.data.at(broadcast.round).class_counts(task.client),
            global_state=broadcast.state,
            received=broadcast.extras,
            memory=copy.deepcopy(work.memory.get("algorithm", {})),
        )
        seed_process(job.seed, "fit", client.round, client.id)
        self._swap_in(broadcast.state, work.memory.get("model", {}))
        if data.stage is not None:
            self.model.begin_task(data.stage.task, data.stage.seen, data.stage.past)
        loss = _MeanLoss()
        keeper = [_KeepOptimizers(work.memory.get("optimizers"))] if job.keep_optimizers else []
        rate = [_RoundRate(job.lr_decay.factor(client.round))] if job.lr_decay else []
        own = copy.deepcopy(job.callbacks) if job.callbacks else []
        trainer.callbacks = [*rate, *own, *keeper, *job.aggregator.client_callbacks(client), loss]  # type: ignore[attr-defined]
        trainer.fit(self.model, data.loader(task.client, job.seed, client.round, task.batches))

        shared, private = split(self.model.state_dict(), self.private)
        update = ClientUpdate(
            client=client.id,
            round=client.round,
            samples=client.samples,
            steps=trainer.steps,
            class_counts=client.class_counts,
            state=clone(shared),
            extras=client.extras,
            metrics={
                "loss": loss.mean(),
                **{k: float(v) for k, v in trainer.logged_metrics.items()},
                **client.metrics,
            },
            bytes_down=nbytes(broadcast.state) + nbytes(broadcast.extras),
        )
        update.bytes_up = nbytes(update.state) + nbytes(update.extras)
        update.seconds = time.perf_counter() - started
        return ClientResult(update, self._memory(client, private, keeper))

    def _memory(
        self, client: ClientContext, private: State, keeper: "list[_KeepOptimizers]"
    ) -> dict[str, Any]:
        memory: dict[str, Any] = {}
        if private:
            memory["model"] = clone(private)
        if client.memory:
            memory["algorithm"] = client.memory
        if keeper:
            memory["optimizers"] = keeper[0].states
        return memory

    def _swap_in(self, shared: State, private: State) -> None:
        """Make the resident model this client's. One that was never here starts from the initial private entries."""
        resident = self.model.state_dict()
        initial = self.job.initial
        load_(resident, {k: initial[k] for k in initial.keys() - shared.keys() - private.keys()})
        load_(resident, shared)
        load_(resident, private)
        if self.job.buffers == "reset":
            load_(resident, {name: initial[name] for name in self.buffers})

    def _rewound_trainer(self) -> ClientTrainer:
        """The resident Trainer, as if it had never fitted anything."""
        if self._trainer is None:
            self._trainer = ClientTrainer(**self.job.trainer_kwargs)
            self._data = self.job.data.to(self._trainer.strategy.root_device)
        self._trainer.rewind(self.model.extra_epochs)
        return self._trainer


def buffer_names(model: LightningModule) -> Sequence[str]:
    """Entries of the state that no optimizer trains: running statistics, counters."""
    trainable = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name not in trainable]


class _MeanLoss(Callback):
    """Mean training loss over the steps of a fit, without a transfer or a log call in each of them."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.steps = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.total = (
                loss.detach().clone() if self.total is None else self.total.add_(loss.detach())
            )
            self.steps += 1

    def mean(self) -> float:
        return float("nan") if self.total is None else float(self.total) / self.steps


class _RoundRate(Callback):
    """Scales the rates of a fit's optimizers before its first step.

    An optimizer that lives on from round to round comes back with the last round's rate; the one it was made with is kept
    beside it under torch's own name for it, ``initial_lr``.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.lr_scheduler_configs:
            raise FlsuiteError(
                f"trainer.lr_decay and the scheduler of {type(pl_module).__name__}.configure_optimizers would both set the "
                "learning rate; leave one of them out"
            )
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * self.factor


class _KeepOptimizers(Callback):
    """Carries a client's optimizer states from one of its fits to the next."""

    def __init__(self, states: list[dict[str, Any]] | None) -> None:
        self.states = states

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer, state in zip(trainer.optimizers, self.states or (), strict=False):
            optimizer.load_state_dict(copy.deepcopy(state))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]
        self.states = move_data_to_device(states, torch.device("cpu"))
