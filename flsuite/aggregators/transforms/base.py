"""The base class of the transforms, which act on a client's change on its way to the server."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flsuite.aggregators.part import Part, Server
from flsuite.random import torch_generator
from flsuite.state import State, Tree


class Payload(NamedTuple):
    """What a client sends, at one place of the chain of transforms.

    Attributes:
        change: The change of the parameters, float64 by name, or the code of a codec.
        statistics: What is sent beside it, by name, or the code of a codec.
        psd: Names of the statistics whose matrices are positive semidefinite, and must stay so.
    """

    change: Any
    statistics: Any
    psd: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FitView:
    """One client's fit, as a transform or an attack sees it.

    Attributes:
        client: The client's number.
        round: The round, counted from 1.
        repeat: Fits that the client has started from the same version before.
        seed: The run's seed.
        received: What :meth:`Transform.broadcast` returned.
        memory: The client's notes for this transform: plain data that is kept from one of its fits
            to the next and never sent.
        metrics: Numbers about the fit, for the log.
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
        """Return the source of a stream of random numbers, which depends on the fit alone."""
        again = f"/{self.repeat}" if self.repeat else ""
        return torch_generator(self.seed, f"{stream}{again}", self.round, self.client)


class Transform(Part, ABC):
    """A step on the way of a client's change to the server, and back.

    Clients apply the transforms in their order, and the server undoes them in reverse. Each has an
    effect in one or more of three places: on a client (:meth:`encode`), on each update that arrives
    (:meth:`decode`), and on what the rule has made of them (:meth:`on_aggregate`). Buffers are no
    direction and pass by.

    A transform with a :meth:`decode` is taken to make changes longer than a transform behind it has
    clipped them to. One with a :meth:`template` alone is taken to send something beside the change,
    which no noise covers. Where this is not so, the transform declares ``withholds`` itself.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "withholds" in own:
            return
        if "decode" in own:
            cls.withholds = {"dense changes": "is undone by the server after it has clipped"}
        elif "template" in own:
            cls.withholds = {"changes alone": "sends more than the change, which no noise covers"}

    def broadcast(self, server: Server) -> dict[str, Any]:
        """Return what every client of the round receives for this transform."""
        return {}

    @abstractmethod
    def encode(self, payload: Payload, fit: FitView) -> Payload:
        """Return what a client passes on.

        A transform without an effect returns the very payload, which then arrives bit for bit.

        Raises:
            ValueError: If a number is not finite.
        """

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        """Return what the server reads.

        Args:
            payload: What arrived. It may be anything.
            template: Shapes and dtypes of what :meth:`encode` was given.
            received: What :meth:`broadcast` sent with the client's version.

        Raises:
            ValueError: If it cannot be read. The text says why.
        """
        return payload

    def template(self, template: Payload) -> Payload:
        """Return shapes and dtypes of what :meth:`encode` makes of such a payload."""
        return template

    def on_aggregate(self, server: Server, model: State, sums: Tree, updates: int) -> State:
        """Return the model of the round, floating-point entries in float64.

        Args:
            server: Its memory is the transform's.
            model: The model of the round, as the rule has made it.
            sums: The sums over clients of the statistics.
            updates: Number of updates behind it.
        """
        return model
