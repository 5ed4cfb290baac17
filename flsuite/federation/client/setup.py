"""What a worker receives once, and what each fit derives from it."""

import copy
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor, ProgressBar
from torch import Tensor

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.uplink import Uplink
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, PositiveInt, require
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Broadcast, ClientContext, FitRequest, replaced
from flsuite.common.score_names import OF_CLASSES
from flsuite.common.state import State, mapped, moved
from flsuite.data.federated import FederatedData
from flsuite.data.loader import TrainLoader, batch_bounds
from flsuite.federation.client.callbacks import LRDecay
from flsuite.federation.client.entries import BatchNorm, Entries
from flsuite.federation.client.profiler import ClientProfiler
from flsuite.models.abilities import extra_epochs

log = logging.getLogger("flsuite")

_ALL_SAMPLES = (
    "has no effect, because scores use all samples; remove it, and for fewer samples set "
    "data.train_samples and data.test_samples"
)
_WORKERS = "because a client trains on one device; spread clients with Processes(workers=4)"
_Accepted = tuple[Any, ...]
# Lightning Trainer arguments: the values that a federation accepts, and what to do about others.
_REFUSED: dict[str, tuple[_Accepted, str]] = {
    "check_val_every_n_epoch": ((None, 1), "has no effect; set trainer.evaluate_every instead"),
    "enable_model_summary": ((), "has no effect in a federation; remove it"),
    "limit_predict_batches": ((None,), _ALL_SAMPLES),
    "limit_test_batches": ((None,), _ALL_SAMPLES),
    "limit_val_batches": ((None,), _ALL_SAMPLES),
    "max_time": (
        (None,),
        "would make results depend on the machine; limit rounds or max_steps",
    ),
    "num_nodes": ((None, 1), f"must be 1, {_WORKERS}"),
    "num_sanity_val_steps": ((None, 0), "has no effect in a federation; remove it"),
    "strategy": ((None, "auto"), f"must be auto, {_WORKERS}"),
    "val_check_interval": ((None,), "has no effect; set trainer.evaluate_every instead"),
}
# Words of an error that a client's fit raises: what to change.
_REMEDIES = {
    "^Early stopping conditioned on metric": "RoundEarlyStopping stops by the scores of the rounds",
    "^Target .* is out of bounds": "correct the label, or give the model an output for it",
    "^shape .* is invalid for input": "take the size from the batch, since the last one is smaller",
    "shapes cannot be multiplied": "make the layer as wide as what it receives",
    "does not require grad": "return the loss itself, not loss.item() or loss.detach()",
    "only for scalar outputs": "return one loss per batch, such as the mean over its samples",
    "have the same dtype|^Input type .* should be the same": "convert samples with x.float()",
    "expected target dtype|multi-target": "give one class per sample, int64 of shape (samples,)",
}
_PRECISIONS = ("32-true", "32", "bf16-mixed", "bf16", "16-mixed", "16", "transformer-engine")
_FEDERATION_CALLBACKS = {
    Checkpoint: "the federation writes checkpoints/last.ckpt and best.ckpt itself",
}
_STAND_INS = {
    ProgressBar: "RoundProgress shows the whole federation's progress",
    LearningRateMonitor: "clients have no logger, and trainer.lr_decay logs lr_factor",
}


@dataclass
class WorkerSetup:
    """All that a worker needs to train any client.

    It is sent once. Data that changes from round to round is part of the
    :class:`~flsuite.common.messages.Broadcast`.

    Attributes:
        model: The model. Its weights are not used.
        data: The samples of all clients.
        uplink: Packs and unpacks the updates that clients send. It has the algorithm, and the names
            and groups of the shared entries.
        seed: The run's seed.
        initial: Initial values of entries that a fit receives from nowhere else: private entries
            before a client's first fit, frozen parameters, and buffers.
        trainer_kwargs: Arguments of each client's Lightning Trainer.
        batchnorm: The treatment of BatchNorm statistics and other buffers. With ``average``, they
            are sent and averaged. With ``local``, they stay with the client. With ``reset``, they
            are sent, but every fit starts from the initial values.
        keep_optimizers: Whether a client keeps the state of its optimizers between its rounds.
        channels_last: Whether images and convolutions use that memory format.
        lr_decay: How learning rates change from round to round. Default: they are constant.
        sums_parts: Whether a worker sends the sums over a part of the cohort instead of each
            update.
        attack: The attack by some clients. Default: none.
        stack: Number of clients that a worker trains as one batched program. With 1, each trains by
            itself.
        records: Whether the steps of a stack are recorded as graphs.
    """

    model: LightningModule
    data: FederatedData
    uplink: Uplink
    seed: int
    initial: State
    trainer_kwargs: dict[str, Any]
    batchnorm: BatchNorm = "average"
    keep_optimizers: bool = False
    channels_last: bool = True
    lr_decay: LRDecay | None = None
    sums_parts: bool = False
    attack: Attack | None = None
    stack: int = 1
    records: bool = False

    def view_of(self, request: FitRequest) -> ClientContext:
        """Return a client's view of the round, as it is when its training begins or has ended.

        Every call returns a new object, because the end of a fit changes it and may run again.
        """
        if request.trained and (client := request.trained.client):
            own: Any = {k: dict(getattr(client, k)) for k in ("memory", "extras", "metrics")}
            return replaced(client, **own)
        broadcast = request.broadcast
        data = self.data.at(broadcast.round)
        return ClientContext(
            id=request.client,
            round=broadcast.round,
            samples=data.samples(request.client),
            class_counts=data.class_counts(request.client),
            global_state=broadcast.state,
            received=broadcast.extras.get("objective", {}),
            memory=mapped(request.memory.get("objective", {}), _copied),
            layout=self.uplink.layout,
        )

    def loader_of(self, data: FederatedData, request: FitRequest, epochs: int = 1) -> TrainLoader:
        """Return the batches of a client's fit, from a view of the data in its round."""
        own = self.seed, request.broadcast.round, request.batches, request.repeat, epochs
        loader = TrainLoader(data, request.client, *own)
        if not request.adapts and self.poisons(request):
            self.attack.poisoned(loader)  # type: ignore[union-attr]
        return loader

    def poisons(self, request: FitRequest) -> bool:
        """Return whether the client of a fit poisons its batches."""
        return self.attack is not None and self.attack.poisons(request.client)


def _copied(leaf: Any) -> Any:
    # A copy of a tensor by deepcopy takes ten times as long.
    return leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


class StartStates:
    """The entries that fits start from.

    Those that are the same for all clients of a round are moved to the device once per round.

    Args:
        setup: The setup of the worker.
        entries: The ownership of the model's entries.
    """

    def __init__(self, setup: WorkerSetup, entries: Entries) -> None:
        self._setup, self._entries = setup, entries
        self._shared: tuple[Broadcast, torch.device, State] | None = None

    def of(self, request: FitRequest, device: torch.device) -> State:
        """Return the entries that a client's fit starts from, the shared ones on a device.

        A client without private entries starts from the initial ones.
        """
        shared = self._of_round(request.broadcast, device)
        private = request.memory.get("model", {})
        # Reset buffers come last, to override the shared ones.
        reset = {name: self._setup.initial[name] for name in self._entries.reset}
        return {**shared, **private, **reset}

    def _of_round(self, broadcast: Broadcast, device: torch.device) -> State:
        kept = self._shared
        if kept is None or kept[0] is not broadcast or kept[1] != device:
            whole = moved({**self._setup.initial, **broadcast.state}, device)
            kept = self._shared = broadcast, device, whole
        return kept[2]


def client_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer that apply to each client's fit.

    Raises:
        FlsuiteError: If a federation does not support an argument, or an argument must be a
            mistake.
    """
    if str(kwargs.get("precision") or "32-true") not in _PRECISIONS:
        raise FlsuiteError(
            f"trainer: precision {kwargs['precision']} is not supported: weights are sent and "
            "averaged in float32; use auto, bf16-mixed, 16-mixed or 32-true"
        )

    for name, (accepted, what) in _REFUSED.items():
        if name in kwargs and kwargs[name] not in accepted:
            raise FlsuiteError(f"trainer: {name} {what}")

    profiler = kwargs.get("profiler")
    profiler = ClientProfiler() if profiler == "simple" else profiler
    if not isinstance(profiler, ClientProfiler | None):
        raise FlsuiteError(
            "trainer: profiler must be simple, which sums over clients, or a ClientProfiler, which "
            f"may name one, got {kwargs['profiler']!r}"
        )
    require("trainer", PositiveInt | None, max_epochs=kwargs.get("max_epochs"))
    require("trainer", PositiveFloat | None, limit_train_batches=kwargs.get("limit_train_batches"))
    require("trainer", NonNegativeFloat | None, gradient_clip_val=kwargs.get("gradient_clip_val"))
    batches = kwargs.get("accumulate_grad_batches")
    require("trainer", PositiveInt | None, accumulate_grad_batches=batches)
    if kwargs.get("max_steps") not in (None, -1):  # -1 means no limit
        require("trainer", PositiveInt, max_steps=kwargs["max_steps"])
    own = {name: value for name, value in kwargs.items() if name not in _REFUSED}
    return own | ({"profiler": profiler} if profiler else {})


def fit_samples(
    trainer_kwargs: Mapping[str, Any], batch_size: int, model: LightningModule
) -> Callable[[int], int]:
    """Return a function from a client's sample count to the samples that one fit processes.

    Args:
        trainer_kwargs: Arguments of each client's Lightning Trainer.
        batch_size: Samples per batch.
        model: The model, which may add epochs of a warm-up.
    """
    epochs = (trainer_kwargs.get("max_epochs") or 1) + extra_epochs(model)
    steps = trainer_kwargs.get("max_steps")

    def processed(samples: int) -> int:
        total = epochs * samples
        if trainer_kwargs.get("limit_train_batches") is not None:
            batches = epoch_batches(trainer_kwargs, len(batch_bounds(samples, batch_size)))
            total = epochs * min(samples, batches * batch_size)
        if steps in (None, -1):
            return total
        per_step = batch_size * (trainer_kwargs.get("accumulate_grad_batches") or 1)
        return min(total, steps * per_step)

    return processed


def epoch_batches(trainer_kwargs: Mapping[str, Any], batches: int) -> int:
    """Return how many batches of an epoch the Trainer takes: a fraction of them, or a number."""
    limit = trainer_kwargs.get("limit_train_batches")
    if limit is None:
        return batches
    return int(batches * limit) if isinstance(limit, float) else min(batches, limit)


def remedy_of(error: BaseException) -> str:
    """Return what to change after an error of a client's fit, if known."""
    text = str(error)
    return next((f"; {what}" for words, what in _REMEDIES.items() if re.search(words, text)), "")


def without_replaced(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks without those that a part of the federation stands in for.

    The log names each, and what stands in for it.
    """
    used = []
    for callback in callbacks:
        stand_ins = (text for kind, text in _STAND_INS.items() if isinstance(callback, kind))
        if text := next(stand_ins, ""):
            log.info("trainer.callbacks: %s is left out: %s", type(callback).__name__, text)
        else:
            used.append(callback)
    return used


def refuse_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse Lightning callbacks that do not work in a client's fit.

    Raises:
        FlsuiteError: If there is one. The message names it, and its replacement.
    """
    for callback in callbacks:
        stops = callback.monitor if isinstance(callback, EarlyStopping) and callback.strict else ""
        # A client's fit may log a loss of its own.
        of_rounds = stops in OF_CLASSES and stops != "loss"
        if of_rounds or stops.startswith(("val_", "val/", "test_", "test/")):
            raise FlsuiteError(
                f"trainer.callbacks: EarlyStopping waits for {stops}, but a client's fit has no "
                "validation; use RoundEarlyStopping"
            )
        for kind, instead in (_FEDERATION_CALLBACKS | _STAND_INS).items():
            if isinstance(callback, kind):
                raise FlsuiteError(
                    f"trainer.callbacks: {type(callback).__name__} belongs to a single fit, but "
                    f"every client has its own; remove it ({instead})"
                )
