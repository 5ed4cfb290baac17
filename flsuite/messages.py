"""What the server and its clients say to each other: plain data, the same in one process, across processes, or on a wire."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flsuite.state import State, mismatch, non_finite

__all__ = [
    "POOLED",
    "Broadcast",
    "ClientContext",
    "ClientFailure",
    "ClientResult",
    "FitAssignment",
    "ClientUpdate",
    "FitRequest",
]

POOLED = -1
"""The number of the pretended client that holds everybody's training samples."""


@dataclass(frozen=True)
class Broadcast:
    """What the server sends at the start of a round, the same for all its clients.

    Attributes:
        round: Counted from 1.
        state: The shared part of the global model.
        extras: What the aggregator adds.
    """

    round: int
    state: State
    extras: dict[str, Any]


@dataclass(frozen=True)
class FitAssignment:
    """One fit to be done: who, and how many batches make one of its epochs (default: one pass over its samples)."""

    client: int
    batches: int | None = None


@dataclass
class ClientContext:
    """What a client's half of an algorithm can see and touch during one fit.

    Attributes:
        id: The client's number.
        round: Counted from 1.
        samples: Training samples.
        class_counts: int64 ``(classes,)``, training samples of each class (of each label, for a multi-label task).
        global_state: The shared model as received; not to be changed.
        received: What the aggregator broadcast beside it.
        memory: The client's own notes, kept from one of its rounds to the next and never sent: plain data.
        extras: What to send with the update: plain data of tensors and numbers.
        metrics: Numbers about this fit, for the log.
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


@dataclass
class ClientUpdate:
    """What a client sends back: the only thing an aggregator sees of it.

    Attributes:
        round: The version of the global model it started from.
        steps: Optimizer steps taken.
        state: The shared part of its model.
        bytes_up, bytes_down: Sent and received, tensors at their own width.
        seconds: Wall time of the fit.
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

    def fault(self, reference: State) -> str | None:
        """Why this update must not reach the global model, or ``None`` if it may."""
        if self.samples < 1:
            return f"claims {self.samples} samples"
        if found := mismatch(self.state, reference):
            return found
        if found := non_finite(self.state) or non_finite(self.extras, "extras"):
            advice = "lower the learning rate, or clip gradients with trainer.gradient_clip_val or the model's own clip"
            return f"{found} is not finite ({advice})"
        return None

    def without_tensors(self) -> "ClientUpdate":
        """The same, for the record."""
        return replace(self, state={}, extras={})


@dataclass
class ClientResult:
    """A finished fit: the update that travels, and the memory that the simulation keeps on the client's behalf."""

    update: ClientUpdate
    memory: dict[str, Any]


@dataclass
class ClientFailure:
    """A fit that came to nothing: who, when and why; ``details`` is a traceback where there is one."""

    client: int
    round: int
    reason: str
    details: str = ""


@dataclass(frozen=True)
class FitRequest:
    """One task with all it needs to be carried out anywhere."""

    task: FitAssignment
    broadcast: Broadcast
    memory: dict[str, Any]
