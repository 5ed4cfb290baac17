"""The base classes of rules, which combine the updates of a round into one model."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from flsuite.aggregators.part import Capability, ClientHalf, Server, Statistic
from flsuite.aggregators.staleness import rebased
from flsuite.common.messages import ClientUpdate, replaced
from flsuite.common.state import State, StateLayout, Sums, Tree, moved

Weighting = Literal["samples", "uniform"]


def withheld_by(sends: str = "") -> Mapping[Capability, str]:
    """Return what a rule withholds from the other parts of a run, with the reasons.

    Args:
        sends: What clients send in addition to their models, for messages. Default: nothing.
    """
    reasons: dict[Capability, str] = {"a plain sum": "is not a plain sum of the clients' changes"}
    if sends:
        reasons["only changes"] = f"sends {sends} with every change, which no noise covers"
    return reasons


Contribution = Callable[[ClientUpdate], Tree]
"""Returns what a client adds to the sums of a round."""


class Reduction(ABC):
    """The updates of a round on their way to one model: each is added, then the round finishes."""

    @abstractmethod
    def add(self, update: ClientUpdate) -> None:
        """Add a checked update."""

    @abstractmethod
    def finish(self) -> tuple[State, Tree]:
        """Return the model of the round, and the sums of the clients' contributions.

        In a round without clients, the model is the global model, and the sums are empty.
        """


class _Sum(Reduction):
    """The sums of a linear rule, without any client's model.

    A worker that trains a whole part of the cohort sends its sum. Rounding depends on the order of
    summation, so the server sums part by part even if it has every update. What has been added is
    dropped: a sum of a large model takes as much memory as two models.
    """

    def __init__(self, rule: "LinearRule", server: Server, contribution: Contribution) -> None:
        self._rule, self._server, self._contribution = rule, server, contribution
        statistics = rule.statistics(server.layout, server.state)
        self._single = [name for name, statistic in statistics.items() if not statistic.is_sum]
        self._sums = self._part_sums = Sums()
        self._part: int | None = None
        self._seen: list[ClientUpdate] = []

    def add(self, update: ClientUpdate) -> None:
        if update.part != self._part:
            self._close_part()
            self._part = update.part
            self._part_sums = self._sums if update.part is None else Sums()
        if update.partial is not None:  # nothing else of its part is added
            self._sums.add(update.partial.values)
            update.partial = Sums()
        else:
            if update.staleness and self._rule.rebases:
                update = rebased(update, self._server)
            self._part_sums.add(self._contribution(update))
        extras = {name: update.extras[name] for name in self._single}
        self._seen.append(replaced(update, state={}, extras=extras, base={}, partial=None))

    def finish(self) -> tuple[State, Tree]:
        self._close_part()
        sums = moved(
            self._sums.values, "cpu"
        )  # sums of this process are still on the training device
        if not self._seen:
            return self._server.state, sums
        return self._rule.result(self._server, sums["rule"], self._seen), sums

    def _close_part(self) -> None:
        if self._part_sums is not self._sums:
            self._sums.add(self._part_sums.values)
            self._part_sums = self._sums


class _Cohort(Reduction):
    """All updates of a round, for a rule that needs each of them."""

    def __init__(self, rule: "CohortRule", server: Server, contribution: Contribution) -> None:
        self._rule, self._server, self._contribution = rule, server, contribution
        self._sums, self._updates = Sums(), deque[ClientUpdate]()

    def add(self, update: ClientUpdate) -> None:
        self._sums.add(self._contribution(update))
        self._updates.append(update)

    def finish(self) -> tuple[State, Tree]:
        if not self._updates:
            return self._server.state, {}
        return self._rule.combine(self._server, self._released()), self._sums.values

    def _released(self) -> Iterator[ClientUpdate]:
        """Yield the updates, and release each: a rule may turn them into something smaller."""
        while self._updates:
            yield self._updates.popleft()


class Rule(ClientHalf, ABC):
    """Combines the updates of a round into one model.

    The model becomes the global model, or gives the server optimizer its gradient.

    It is a :class:`LinearRule`, which needs only sums over clients, a :class:`CohortRule`, which
    needs all of them, or a rule whose :meth:`begin` takes them in one by one. Its
    client half measures statistics after the clients' fits.

    Attributes:
        weighting: Whether clients count by their training samples, or all alike.
    """

    weighting: Weighting = "uniform"
    withholds = withheld_by()

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return what every client sends in addition to its model, by name."""
        return {}

    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of a client, before the factor for staleness.

        It runs in a worker or on the server, perhaps more than once. It depends on the update
        alone.
        """
        return 1.0

    def too_few(self, updates: int) -> str | None:
        """Return why this number of updates is too small, and what to change, or ``None``."""
        return None

    @abstractmethod
    def begin(self, server: Server, contribution: Contribution | None = None) -> Reduction:
        """Begin a round, whose updates are then added one by one.

        Args:
            server: The rule's view of the server.
            contribution: Returns what a client adds to the sums of a round. Default: only the terms
                of the rule.
        """


class LinearRule(Rule):
    """A rule that needs only sums over clients.

    Workers sum over the clients that they train, and secure aggregation computes the sums without
    revealing any client's terms.

    Attributes:
        rebases: Whether the change of a late client is applied to the current global model.
            Otherwise, its terms are those of its own model.
    """

    rebases: ClassVar[bool] = True

    def weight(self, update: ClientUpdate) -> float:
        return float(update.samples) if self.weighting == "samples" else 1.0

    @abstractmethod
    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        """Return a client's terms of the sums: nested dicts of tensors and numbers.

        Floating-point tensors are summed in float64. Integer tensors take their maximum. It runs
        in a worker or on the server, and reads what the client sends.

        Args:
            update: The update. Its state is the client's model, see ``rebases``.
            layout: Names and groups of the shared entries.
        """

    @abstractmethod
    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        """Return the model of the round, floating-point entries in float64.

        Args:
            server: The rule's view of the server.
            sums: The sums of :meth:`terms`.
            updates: The updates without their models, with the statistics that are not sums.
        """

    def begin(self, server: Server, contribution: Contribution | None = None) -> Reduction:
        def terms(update: ClientUpdate) -> Tree:
            return {"rule": self.terms(update, server.layout)}

        return _Sum(self, server, contribution or terms)


class CohortRule(Rule):
    """A rule that needs every client's own update."""

    needs = frozenset({"each update"})

    @abstractmethod
    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        """Return the model of the round.

        Args:
            server: The rule's view of the server.
            updates: The checked updates, in a fixed order. ``update.base`` is the model that the
                client started from.
        """

    def begin(self, server: Server, contribution: Contribution | None = None) -> Reduction:
        return _Cohort(self, server, contribution or (lambda update: {}))


class RuleAround(CohortRule):
    """A rule that changes the updates of a round before another rule receives them.

    By default, all other methods and declarations are those of that rule.

    Attributes:
        rule: The other rule.
    """

    rule: Rule

    @property
    def weighting(self) -> Weighting:  # type: ignore[override]
        return self.rule.weighting

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return self.rule.needs

    @property
    def withholds(self) -> Mapping[Capability, str]:  # type: ignore[override]
        return self.rule.withholds

    def prepare(self, server: Server) -> None:
        self.rule.prepare(server)

    def broadcast(self, server: Server) -> dict[str, Any]:
        return self.rule.broadcast(server)

    @property
    def half(self) -> ClientHalf:
        return self.rule.half

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return self.rule.statistics(layout, state)

    def weight(self, update: ClientUpdate) -> float:
        return self.rule.weight(update)

    def too_few(self, updates: int) -> str | None:
        return self.rule.too_few(updates)

    def of_rule(self, server: Server, updates: Iterable[ClientUpdate]) -> State:
        """Return the model that the other rule computes from updates."""
        reduction = self.rule.begin(server)
        for update in updates:
            reduction.add(update)
        return reduction.finish()[0]


@contextmanager
def timed(server: Server) -> Iterator[None]:
    """Log the duration of the block as ``server_seconds``."""
    started = time.perf_counter()
    yield
    server.metrics["server_seconds"] = time.perf_counter() - started
