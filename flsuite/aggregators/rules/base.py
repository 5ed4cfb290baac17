"""The base classes of the rules, which turn the updates of a round into one model."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from lightning.pytorch import Callback

from flsuite.aggregators.part import Capability, Part, Server, Statistic
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.state import State, StateLayout, Tree

__all__ = ["CohortRule", "LinearRule", "Rule", "timed"]


class Rule(Part, ABC):
    """How the updates of a round become one model, which the server then moves to.

    It is a :class:`LinearRule`, for which sums over clients are enough, or a :class:`CohortRule`.
    What clients measure for it after their fits, its statistics, is its client half.
    """

    _sends: str = ""  # what clients send beside their models, for messages
    _sends_matrices: bool = False  # whether these are symmetric positive semidefinite

    @property
    def withholds(self) -> Mapping[Capability, str]:  # type: ignore[override]
        """Return what the other parts of a run do not get, each with the reason."""
        reasons: dict[Capability, str] = {"a plain sum": "is no plain sum of the clients' changes"}
        if self._sends:
            reasons["changes alone"] = (
                f"sends {self._sends} with every change, which no noise covers"
            )
        if self._sends_matrices:
            reasons["rounded matrices"] = (
                f"sends {self._sends}, which rounding would make indefinite"
            )
        else:
            reasons["matrices"] = "sends none"
        return reasons

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the client half: callbacks that measure the trained model."""
        return []

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return what every client sends beside its model, by name."""
        return {}

    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of a client, without damping. It is a part of the client half."""
        return 1.0


class LinearRule(Rule):
    """A rule that needs sums over clients alone.

    Workers form the sums of the clients that they train, and secure aggregation forms them without
    showing any of them.
    """

    @abstractmethod
    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        """Return what a client adds to the sums: nested dicts of tensors and numbers.

        Floating-point tensors are summed in float64. Integer tensors take their maximum. It is a
        part of the client half, and reads what the client sends.

        Args:
            update: The update. Its state is the client's model, or its change applied to the
                current global model if the client is late.
            layout: Names and groups of the entries that travel.
        """

    @abstractmethod
    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        """Return the model of the round, floating-point entries in float64.

        Args:
            server: What the rule sees on the server.
            sums: The sums of :meth:`terms`.
            updates: The updates without their models. They have the statistics that are no sums.
        """


class CohortRule(Rule):
    """A rule that needs every client's own update."""

    needs = frozenset({"each update"})

    @abstractmethod
    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        """Return the model of the round.

        Args:
            server: What the rule sees on the server.
            updates: The checked updates, in a fixed order. ``update.base`` is the model that the
                client started from.
        """

    def too_few(self, updates: int) -> str | None:
        """Return why this number of updates is too small, and what to change, or ``None``."""
        return None


@contextmanager
def timed(server: Server) -> Iterator[None]:
    """Log the time of what is inside as ``server_seconds``."""
    started = time.perf_counter()
    yield
    server.metrics["server_seconds"] = time.perf_counter() - started
