"""Messages between the server and its clients.

They are plain data, identical in one process, across processes, and on the network.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from lightning.pytorch import Callback
from torch import Tensor

from flsuite.common.client import ClientContext as ClientContext
from flsuite.common.errors import one_line
from flsuite.common.state import State, Sums, mismatch, nbytes, non_finite

POOLED = -1
"""The number of the virtual client that holds the training samples of all clients."""

MOST = 2**53
"""The largest count in a message. Up to here, a float holds every integer."""


Fault = Literal["raises", "nan", "shapes", "hangs", "dies", "late", "twice", "gone"]
"""An injected fault, see :class:`flsuite.federation.Faults`."""

_Message = TypeVar("_Message")


def replaced(message: _Message, **values: Any) -> _Message:
    """Return a copy of a message with other values.

    ``dataclasses.replace`` sets field by field, which is slow for each client in each round.
    """
    new = object.__new__(type(message))
    vars(new).update(vars(message), **values)
    return new


@dataclass(frozen=True)
class Broadcast:
    """One version of the global model, as sent to the clients that start from it.

    Attributes:
        round: The round that the clients train in, counted from 1. The version of the global model
            is ``round - 1``, the number of aggregations so far.
        state: The shared part of the global model.
        extras: What the aggregator sends in addition to the model.
        callbacks: The user's Lightning callbacks at the start of the round. Every fit works on a
            copy, so all clients of a round see the same state on every engine.
    """

    round: int
    state: State
    extras: dict[str, Any]
    callbacks: tuple[Callback, ...] = ()

    @cached_property
    def bytes(self) -> int:
        """Return the bytes that a client receives."""
        return nbytes(self.state) + nbytes(self.extras)


@dataclass(frozen=True)
class TrainedFit:
    """The outcome of a client's local training that was done elsewhere.

    It was reused from another run, or trained in a stack of clients.

    Attributes:
        state: The shared part of the trained model. After a stack, all entries.
        memory: The memory that the client keeps: ``model`` and ``optimizers``, if any.
        steps: Optimizer steps taken.
        metrics: Metrics of the fit.
        seconds: Wall time of the training.
        client: The client's view of the round, as its algorithm has left it. ``None`` if the
            algorithm has not seen the training.
        measures: Whether the algorithm still measures the trained model.
        epochs: Epochs that the training has begun. Default: all of the fit.
    """

    state: State
    memory: dict[str, Any]
    steps: int
    metrics: dict[str, float]
    seconds: float
    client: ClientContext | None = None
    measures: bool = True
    epochs: int | None = None


@dataclass(frozen=True)
class FitRequest:
    """One fit with all that a worker needs to run it.

    Attributes:
        number: Number of the fit in the run, from 0. It identifies the request.
        client: The client's number.
        broadcast: The version of the global model to start from.
        memory: The client's memory from earlier rounds.
        batches: Batches per local epoch. Default: one pass over the client's samples.
        repeat: Number of earlier fits that the client started from the same version. Each fit has
            its own randomness.
        trained: The outcome of this fit's training, if it was done elsewhere. The client does not
            train again.
        part: The part of the cohort that the client belongs to. One worker may train a whole part.
            Default: the client trains alone.
        fault: The fault to inject in this fit. Default: none.
        stands_for: Fits of a cohort that this fit replaces.
        adapts: Epochs in which the client adapts its own model, without the algorithm. The outcome
            is scored, not aggregated. 0 for an ordinary fit.
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
    adapts: int = 0

    is_score: ClassVar[Literal[False]] = False

    def failure(
        self, reason: str, details: str = "", before_first_step: bool = False
    ) -> "ClientFailure":
        """Return the outcome of this request as a failure."""
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
        part: Scores on the client's part of the split. Empty if the client has none.
        classes: Accuracy per class, if requested.
    """

    whole: dict[str, float]
    part: dict[str, float]
    classes: dict[str, float]


@dataclass(frozen=True)
class ScoreRequest:
    """A request to score one client's own model.

    Attributes:
        number: It identifies the request.
        client: The client's number.
        broadcast: The version of the global model to score with. Its round is the last completed
            one.
        own: The entries in which the client's own model differs from the global one.
        split: The split to score on.
        details: Whether to add the accuracy per class.
    """

    number: int
    client: int
    broadcast: Broadcast
    own: State
    split: Split
    details: bool

    is_score: ClassVar[Literal[True]] = True

    def failure(self, reason: str, details: str = "") -> "ClientFailure":
        """Return the outcome of this request as a failure."""
        return ClientFailure(self.client, self.broadcast.round, reason, details)


@dataclass
class ClientUpdate:
    """The message that a client sends back. An aggregator sees nothing else of the client.

    Attributes:
        client: The client's number.
        round: The round that it trained in, counted from 1. It started from version ``round - 1``.
        samples: Number of training samples.
        steps: Optimizer steps taken.
        class_counts: Training samples per class, int64 ``(classes,)``. Empty under secure
            aggregation.
        state: The shared part of its model.
        extras: What the client half of the algorithm sends in addition.
        metrics: Metrics of the fit, for the log.
        bytes_up: Bytes sent, tensors in their own dtype.
        bytes_down: Bytes received.
        seconds: Wall time of the fit.
        number: Number of the fit in the run. The server accepts each fit once.
        staleness: Aggregations between the version that it started from and its arrival. Set by
            the server, to 0 in a synchronous round.
        base: The shared state that the client started from, set by the server. Without staleness,
            it is the global state. It must not be changed.
        part: The part of the cohort that the client belongs to. Set by the server.
        partial: The partial sum of the part's contributions, if a worker has computed it. The last
            update of the part carries it and the others have an empty one. None of these updates
            has a state.
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
            state: A state with the expected keys, shapes and dtypes.
            extras: Statistics with the expected keys, shapes and dtypes, see
                :meth:`Aggregator.statistics`.
        """
        return mismatch(self.state, state) or mismatch(self.extras, extras, "extras")

    def fault(self, reads_numbers: bool = True) -> str | None:
        """Return why this update must not reach the aggregator, or ``None`` if it may.

        Args:
            reads_numbers: Whether to check that every number is finite.
        """
        if fault := self._fault_of_numbers():
            return fault

        if not reads_numbers:
            return None

        name = non_finite(self.state) or non_finite(self.extras, "extras")
        if name is None:
            return None
        return (
            f"{name} is not finite; lower the learning rate, clip gradients with "
            "trainer.gradient_clip_val, or look for such numbers in the samples"
        )

    def _fault_of_numbers(self) -> str | None:
        """Return what is wrong with the non-tensor fields, which make up the record."""
        if not is_count(self.samples) or self.samples < 1:
            return f"it claims {_shown(self.samples)} training samples"
        for name in ("steps", "bytes_up", "bytes_down"):
            if not is_count(value := getattr(self, name)):
                return f"its {name} are {_shown(value)}"
        if type(self.seconds) not in (int, float) or not 0 <= self.seconds <= MOST:
            return f"its seconds are {_shown(self.seconds)}"
        if not isinstance(self.metrics, dict) or any(
            type(name) is not str or type(value) not in (int, float)
            for name, value in self.metrics.items()
        ):
            return f"its metrics are not numbers: {self.metrics!r}"[:200]
        return self._fault_of_class_counts()

    def _fault_of_class_counts(self) -> str | None:
        counts = self.class_counts
        if not isinstance(counts, Tensor) or counts.ndim != 1:
            return "its class counts are not a vector"
        if counts.dtype != torch.int64 or counts.layout != torch.strided:
            return f"its class counts are {counts.dtype}, {counts.layout}; int64 is expected"
        # A sample has a class once, or a label once.
        low, high = map(int, counts.aminmax()) if counts.numel() else (0, 0)
        if low < 0 or high > self.samples:
            return f"its class counts are not between 0 and its {self.samples} samples"
        return None

    def without_tensors(self) -> "ClientUpdate":
        """Return a copy without tensors, for the record.

        The copy shares ``metrics``, so an aggregator can still add the client's weight to them.
        """
        return replaced(self, state={}, extras={}, base={}, partial=None)


Profile = dict[str, tuple[int, float]]
"""Calls and seconds in total, by the name of a step."""


@dataclass
class ClientResult:
    """A finished fit.

    Attributes:
        update: The message to the server.
        memory: The client's memory for its next round: ``model`` (private entries), ``objective``
            (its notes), ``optimizers``, ``transforms`` (notes by the position of the transform)
            and, until it is masked, ``unmasked``, if any.
        training: The metrics of local training alone.
        epochs: Epochs that the training has begun. Default: all of the fit.
        profile: The profile of the training, if one was requested.
        failed: Whether there is no update, as in a :class:`ClientFailure`.
    """

    failed: ClassVar[Literal[False]] = False

    update: ClientUpdate
    memory: dict[str, Any]
    training: dict[str, float] = field(default_factory=dict)
    epochs: int | None = None
    profile: Profile = field(default_factory=dict)

    def fault(self, reads_numbers: bool = True) -> str | None:
        """Return why the update must not reach the aggregator, or ``None`` if it may.

        A worker has already checked the sums that it computed.

        Args:
            reads_numbers: Whether to check that every number is finite.
        """
        if self.update.partial is not None:
            return None
        if fault := self.update.fault(reads_numbers):
            return fault
        if not isinstance(self.memory, dict):
            return "its memory is not a dict"
        kept = (self.memory.get(part, {}) for part in ("model", "objective"))
        name = next(filter(None, map(non_finite, kept)), None)
        if name is None:
            return None
        return f"its private entry {name} is not finite; lower the learning rate"


@dataclass
class ClientFailure:
    """A fit without an update.

    Attributes:
        client: The client's number.
        round: The round of the fit.
        reason: The reason on one line.
        details: The traceback, if any.
        before_first_step: Whether the client's code raised before its first step. If all clients
            fail in this way, the settings are to blame.
        number: Number of the fit in the run. The server accepts each fit once.
        steps: Optimizer steps of an update that was sent but not used, because it was refused or
            late. 0 if nothing was sent.
    """

    failed: ClassVar[Literal[True]] = True

    client: int
    round: int
    reason: str
    details: str = ""
    before_first_step: bool = False
    number: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        # The reason may come from another machine.
        self.reason = one_line(self.reason, 500)


def is_count(value: Any) -> bool:
    """Return whether a value of a message is an integer from 0 to :data:`MOST`."""
    return type(value) is int and 0 <= value <= MOST


def _shown(value: Any) -> str:
    """Return a value of a message as text. Python does not print integers of any length."""
    return "more than 2**53" if type(value) is int and value > MOST else repr(value)[:80]


Outcome = ClientResult | ClientFailure
