"""What a transform is, and the clipping of updates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability, Part, Server
from flsuite.common.arguments import Radius, Settings
from flsuite.common.random import torch_generator
from flsuite.common.state import State, Tree, non_finite


class Payload(NamedTuple):
    """What a client sends, at one position in the chain of transforms.

    Attributes:
        change: The change of the parameters, float64 by name, or a codec's code.
        statistics: Additional tensors by name, or a codec's code.
        psd: Names of the statistics whose matrices are positive semidefinite, and must stay so.
    """

    change: Any
    statistics: Any
    psd: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FitView:
    """One client's fit, as seen by a transform or an attack.

    Attributes:
        client: The client's number.
        round: The round, counted from 1.
        repeat: Number of earlier fits that the client started from the same version.
        seed: The run's seed.
        received: The return value of :meth:`Transform.broadcast`.
        memory: The client's notes for this transform: plain data that persists between its fits and
            is never sent.
        metrics: Metrics of the fit, for the log.
        base: The shared state that the client started from. It must not be changed.
    """

    client: int
    round: int
    seed: int
    repeat: int = 0
    received: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    base: State = field(default_factory=dict)

    def generator(self, stream: str) -> torch.Generator:
        """Return the random generator of a stream. It depends only on the fit."""
        again = f"/{self.repeat}" if self.repeat else ""
        return torch_generator(self.seed, f"{stream}{again}", self.round, self.client)


class Transform(Part, ABC):
    """A step that a client's change takes on its way to the server.

    Clients apply the transforms in order, and the server undoes them in reverse order. A transform
    acts in one or more of three places: on a client (:meth:`encode`), on each update that arrives
    (:meth:`decode`), and on the output of the rule (:meth:`on_aggregate`). Buffers bypass
    transforms.

    A transform with a :meth:`decode` is assumed to lengthen changes that a later transform has
    clipped. A transform with only a :meth:`template` is assumed to send more than the change, which
    noise does not cover. If this does not apply, the transform declares ``withholds`` itself.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "withholds" in own:
            return
        if "decode" in own:
            cls.withholds = {"dense changes": "is undone by the server after it has clipped"}
        elif "template" in own:
            cls.withholds = {"only changes": "sends more than the change, which no noise covers"}

    @abstractmethod
    def encode(self, payload: Payload, fit: FitView) -> Payload:
        """Return what a client passes on.

        If a transform has no effect, it returns the same payload object, which then arrives bit for
        bit.

        Raises:
            ValueError: If a number is not finite.
        """

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        """Return what the server reads.

        Args:
            payload: The received payload. It may contain anything.
            template: Shapes and dtypes of the input of :meth:`encode`.
            received: The return value of :meth:`broadcast` for the client's version.

        Raises:
            ValueError: If it cannot be read. The message says why.
        """
        return payload

    def template(self, template: Payload) -> Payload:
        """Return shapes and dtypes of the output of :meth:`encode` for such a payload."""
        return template

    def on_aggregate(self, server: Server, model: State, sums: Tree, updates: int) -> State:
        """Return the model of the round, floating-point entries in float64.

        Args:
            server: Its memory is the transform's.
            model: The model of the round, from the rule.
            sums: The sums of the statistics over clients.
            updates: Number of updates in the sums.
        """
        return model


ENCODES: Mapping[Capability, str] = dict.fromkeys(
    ("dense changes", "exact changes", "plain updates"), "encodes them"
)
"""The capabilities that every codec withholds."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor, with a shape and a dtype but without values."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def refuse(fault: str | None) -> None:
    """Refuse a message with a fault.

    Raises:
        ValueError: If there is one.
    """
    if fault:
        raise ValueError(fault)


def require_finite(tree: Tree) -> None:
    """Refuse nested data with NaN or infinity, which no code can represent.

    Raises:
        ValueError: If there is one. The message names the entry.
    """
    if name := non_finite(tree):
        raise ValueError(
            f"{name} is not finite; lower the learning rate, clip gradients with "
            "trainer.gradient_clip_val, or look for such numbers in the samples"
        )


@dataclass(frozen=True)
class ClipUpdates(Transform, Settings):
    """A change ``D`` becomes ``D min(1, norm / ||D||)``, over all parameters together.

    Take it to bound what a single client can change.

    The client clips, and the server clips again, because an attacker may not clip. Clients log
    ``update_norm``, the norm before clipping.

    Args:
        norm: Maximum L2 norm of a change. It may be infinite.
    """

    norm: Radius = 1.0

    needs = frozenset({"dense changes"})
    withholds = {
        "plain updates": "clips every update that arrives",
        "exact changes": "shortens them",
    }

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        payload, fit.metrics["update_norm"] = clipped(payload, self.norm)
        return payload

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        return clipped(payload, self.norm)[0]


def clipped(payload: Payload, norm: float) -> tuple[Payload, float]:
    """Return a payload with its change clipped to a maximum norm, and the norm before clipping.

    A change within the norm returns the same payload object. After rounding to the dtype of the
    model, a clipped change may exceed the norm by a relative 1e-7.
    """
    change: State = payload.change
    squares = [float(value.square().sum()) for value in change.values()]
    before = math.sqrt(math.fsum(squares))
    if before <= norm or math.isnan(before):  # NaN is refused by name on arrival
        return payload, before
    change = {name: value * (norm / before) for name, value in change.items()}
    return payload._replace(change=change), before
