"""Messages between the server and its clients.

They are plain data: the same in one process, across processes, and on a wire.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lightning.pytorch import Callback
from torch import Tensor

from flsuite.state import State, StateLayout, Sums, mismatch, non_finite

POOLED = -1
"""The number of the virtual client that holds the training samples of all clients."""


Fault = Literal["raises", "nan", "shapes", "hangs", "dies", "late", "twice", "gone"]
"""A fault on purpose, see :class:`flsuite.schedules.Faults`."""


@dataclass(frozen=True)
class Broadcast:
    """One version of the global model, as it is sent to the clients that start from it.

    Attributes:
        round: The round that the clients train in, counted from 1. The version of the global model
            is ``round - 1``, the number of aggregations done.
        state: The shared part of the global model.
        extras: What the aggregator sends beside the model.
        callbacks: The user's Lightning callbacks as they are when the round starts. Every fit works
            on a copy, so that all clients of a round see the same state on every engine.
    """

    round: int
    state: State
    extras: dict[str, Any]
    callbacks: tuple[Callback, ...] = ()


@dataclass(frozen=True)
class TrainedFit:
    """The outcome of a client's local training, kept from another run.

    Attributes:
        state: The shared part of the trained model.
        memory: What the client keeps of it: ``model`` and ``optimizers``, where there are any.
        steps: Optimizer steps taken.
        metrics: Numbers about the fit.
        seconds: Wall time of the training.
    """

    state: State
    memory: dict[str, Any]
    steps: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class FitRequest:
    """One fit with all that a worker needs to carry it out.

    Attributes:
        number: Number of the fit in the run, from 0. It identifies the request.
        client: The client's number.
        broadcast: The version of the global model to start from.
        memory: What the client has kept from its earlier rounds.
        batches: Batches per local epoch. Default: one pass over the client's samples.
        repeat: Fits that the client has started from the same version before. Each has randomness
            of its own.
        trained: What this very fit has led to in another run. The client then does not train again.
        part: The part of the cohort that the client is in. One worker may train a whole part.
            Default: it trains for itself.
        fault: How this fit is to fail, for an experiment. Default: not at all.
        stands_for: Fits of a cohort that it replaces.
    """

    number: int
    client: int
    broadcast: Broadcast
    memory: dict[str, Any]
    batches: int | None = None
    repeat: int = 0
    trained: TrainedFit | None = None
    part: int | None = None
    fault: Fault | None = None
    stands_for: int = 1

    def failure(
        self, reason: str, details: str = "", before_first_step: bool = False
    ) -> "ClientFailure":
        """Return the outcome of this request if it fails."""
        round = self.broadcast.round
        return ClientFailure(self.client, round, reason, details, before_first_step, self.number)


Split = Literal["val", "test"]
"""The split that a model is scored on."""

Scores = dict[str, dict[str, float]]
"""Scope (``global`` or a client's number) to metric to value."""


class OwnScores(NamedTuple):
    """Scores of a client's own model on one split.

    Attributes:
        whole: Scores on the whole split.
        part: Scores on the client's part of the split. It is empty where the client has none.
        classes: Accuracy per class, if asked for.
    """

    whole: dict[str, float]
    part: dict[str, float]
    classes: dict[str, float]


@dataclass(frozen=True)
class ScoreRequest:
    """One client's own model, to be scored.

    Attributes:
        number: It identifies the request.
        client: The client's number.
        broadcast: The version of the global model that it is scored with. Its round is the last one
            done.
        private: The client's private entries. It is empty if the client never trained.
        split: The split to score on.
        details: Whether to add the accuracy per class.
    """

    number: int
    client: int
    broadcast: Broadcast
    private: State
    split: Split
    details: bool

    def failure(self, reason: str, details: str = "") -> "ClientFailure":
        """Return the outcome of this request if it fails."""
        return ClientFailure(self.client, self.broadcast.round, reason, details)


@dataclass
class ClientContext:
    """The part of a fit that the client half of an algorithm can see and change.

    Attributes:
        id: The client's number.
        round: The round, counted from 1.
        samples: Number of training samples.
        class_counts: Training samples per class (per label in a multi-label task), int64
            ``(classes,)``.
        global_state: The shared model as received. It must not be changed.
        received: What the part of the algorithm has broadcast beside it.
        memory: The client's own notes, plain data. They are kept from one of its rounds to the next
            and never sent.
        extras: What to send with the update: nested dicts of tensors and numbers.
        metrics: Numbers about this fit, for the log.
        layout: Names and groups of the entries that travel.
    """

    id: int
    round: int
    samples: int
    class_counts: Tensor
    global_state: State
    received: dict[str, Any]
    memory: dict[str, Any]
    extras: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    layout: StateLayout = field(default_factory=lambda: StateLayout((), 0))


@dataclass
class ClientUpdate:
    """The message that a client sends back, which is all that an aggregator sees of it.

    Attributes:
        client: The client's number.
        round: The round that it trained in, counted from 1. It started from version ``round - 1``.
        samples: Number of training samples.
        steps: Optimizer steps taken.
        class_counts: Training samples per class, int64 ``(classes,)``. It is empty under a secure
            sum.
        state: The shared part of its model.
        extras: What the client half of the algorithm sends beside it.
        metrics: Numbers about the fit, for the log.
        bytes_up: Bytes sent, tensors in their own dtype.
        bytes_down: Bytes received.
        seconds: Wall time of the fit.
        number: Number of the fit in the run. The server takes each fit once.
        staleness: Aggregations between the version it started from and its arrival. The server sets
            it, to 0 in a synchronous round.
        base: The shared state that the client started from. The server sets it. Without staleness
            it is the global state. It must not be changed.
        part: The part of the cohort that the client is in. The server sets it.
        partial: What the clients of the part add to the sums of the round, where a worker has
            added it up. The last update of the part has it and the others have an empty one. None
            of them has a state then.
    """

    client: int
    round: int
    samples: int
    steps: int
    class_counts: Tensor
    state: State
    extras: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    number: int = 0
    staleness: int = 0
    base: State = field(default_factory=dict)
    part: int | None = None
    partial: Sums | None = None

    def mismatch(self, state: State, extras: dict[str, Any]) -> str | None:
        """Return how the update differs from templates of its tensors, or ``None``.

        Args:
            state: The state, of which keys, shapes and dtypes count.
            extras: The statistics, likewise, see :meth:`Aggregator.statistics`.
        """
        return mismatch(self.state, state) or mismatch(self.extras, extras, "extras")

    def fault(self, reads_numbers: bool = True) -> str | None:
        """Return why this update must not reach the aggregator, or ``None`` if it may.

        Args:
            reads_numbers: Whether every number is looked at: it must be finite.
        """
        if fault := self._fault_of_numbers():
            return fault

        # Checked last, because it reads every number of the update.
        name = (
            non_finite(self.state) or non_finite(self.extras, "extras") if reads_numbers else None
        )
        if name is not None:
            return (
                f"{name} is not finite; lower the learning rate, or clip gradients with "
                "trainer.gradient_clip_val or the model's own clip"
            )
        return None

    def _fault_of_numbers(self) -> str | None:
        """Return what is wrong with the numbers beside the tensors, which the record is made of."""
        if type(self.samples) is not int or self.samples < 1:
            return f"it claims {self.samples!r} training samples"
        for name in ("steps", "bytes_up", "bytes_down", "seconds"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                return f"its {name} are {value!r}"
        for name, value in self.metrics.items() if isinstance(self.metrics, dict) else [("", "")]:
            if type(name) is not str or type(value) not in (int, float):
                return f"its metrics are no numbers: {self.metrics!r}"[:200]
        if not isinstance(self.class_counts, Tensor) or self.class_counts.ndim != 1:
            return "its class counts are no vector"
        return None

    def without_tensors(self) -> "ClientUpdate":
        """Return a copy without tensors, for the record.

        It shares ``metrics``, so that an aggregator can still add the weight that it gives.
        """
        return replace(self, state={}, extras={}, base={}, partial=None)


@dataclass
class ClientResult:
    """A finished fit.

    Attributes:
        update: What travels to the server.
        memory: What the client keeps for its next round: ``model`` (private entries), ``objective``
            (its notes), ``optimizers``, ``transforms`` (notes by the place of the transform) and,
            until it is masked, ``held``, where there are any.
        training: The numbers about the fit that local training alone has led to.
    """

    update: ClientUpdate
    memory: dict[str, Any]
    training: dict[str, float] = field(default_factory=dict)

    def fault(self, reads_numbers: bool = True) -> str | None:
        """Return why the update must not reach the aggregator, or ``None`` if it may.

        The argument is that of :meth:`ClientUpdate.fault`. What a worker has added up, it has
        checked.
        """
        if self.update.partial is not None:
            return None
        if fault := self.update.fault(reads_numbers):
            return fault
        if not isinstance(self.memory, dict):
            return "what it keeps is no dict"
        name = non_finite(self.memory.get("model", {}))
        return None if name is None else f"its private entry {name} is not finite"


@dataclass
class ClientFailure:
    """A fit without an update.

    Attributes:
        client: The client's number.
        round: The round that it should have trained in.
        reason: The reason on one line.
        details: The traceback, where there is one.
        before_first_step: Whether the client's code raised before its first step. If all clients
            fail in this way, a setting is the reason.
        number: Number of the fit in the run. The server takes each fit once.
        steps: Optimizer steps of an update that the client has sent and nobody uses, because it
            was refused or late. It is 0 where nothing was sent.
    """

    client: int
    round: int
    reason: str
    details: str = ""
    before_first_step: bool = False
    number: int = 0
    steps: int = 0


Outcome = ClientResult | ClientFailure
