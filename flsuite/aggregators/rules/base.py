"""The base classes of the rules, which turn the updates of a round into one model."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice

from lightning.pytorch import Callback

from flsuite.aggregators.part import Capability, Part, Server, Statistic
from flsuite.aggregators.staleness import rebased
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.state import State, StateLayout, Sums, Tree


def withheld_by(sends: str = "", are_matrices: bool = False) -> Mapping[Capability, str]:
    """Return what a rule withholds from the other parts of a run, each with its reason.

    Args:
        sends: What clients send in addition to their models, for messages. Default: nothing.
        are_matrices: Whether these are symmetric positive semidefinite.
    """
    reasons: dict[Capability, str] = {"a plain sum": "is no plain sum of the clients' changes"}
    if sends:
        reasons["changes alone"] = f"sends {sends} with every change, which no noise covers"
    if are_matrices:
        reasons["rounded matrices"] = f"sends {sends}, which rounding would make indefinite"
    else:
        reasons["matrices"] = "sends none"
    return reasons


class Rule(Part, ABC):
    """How the updates of a round become one model, which the server then moves to.

    It is a :class:`LinearRule`, for which sums over clients are enough, or a :class:`CohortRule`.
    What clients measure for it after their fits, its statistics, is its client half.
    """

    withholds = withheld_by()

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the client half: callbacks that measure the trained model."""
        return []

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return what every client sends in addition to its model, by name."""
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


class RuleAround(CohortRule):
    """A rule that changes the updates of a round before another rule gets them.

    What it needs, withholds and measures is the other rule's, as far as it does not say otherwise.
    """

    @property
    @abstractmethod
    def inner(self) -> Rule:
        """Return the other rule."""

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return self.inner.needs

    @property
    def withholds(self) -> Mapping[Capability, str]:  # type: ignore[override]
        return self.inner.withholds

    def prepare(self, server: Server) -> None:
        self.inner.prepare(server)

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return self.inner.callbacks(client)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return self.inner.statistics(layout, state)

    def weight(self, update: ClientUpdate) -> float:
        return self.inner.weight(update)

    def too_few(self, updates: int) -> str | None:
        return self.inner.too_few(updates) if isinstance(self.inner, CohortRule) else None

    def of_inner(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        """Return the model that the other rule makes of updates."""
        rule = self.inner
        if isinstance(rule, CohortRule):
            return rule.combine(server, updates)
        assert isinstance(rule, LinearRule)
        terms = partial(rule.terms, layout=server.layout)
        return rule.result(server, *sum_by_parts(rule, server, updates, terms))


def sum_by_parts(
    rule: LinearRule,
    server: Server,
    updates: Iterable[ClientUpdate],
    contribution: Callable[[ClientUpdate], Tree],
) -> tuple[Tree, list[ClientUpdate]]:
    """Return the sums of what clients contribute, and the updates without their models.

    A worker that trains a whole part sends its sum. What a sum rounds to depends on the order of
    its terms, so that the server sums part by part where it has every update too.

    Args:
        rule: The rule. The updates keep those of its statistics that are no sums.
        server: What the server knows. The changes of late clients are applied to its model.
        updates: The updates.
        contribution: Returns what an update adds.
    """
    statistics = rule.statistics(server.layout, server.state)
    single = [name for name, statistic in statistics.items() if not statistic.is_sum]
    sums, seen = Sums(), list[ClientUpdate]()
    part, own = None, sums
    for update in updates:
        if update.part != part:
            if own is not sums:
                sums.merge(own)
            part, own = update.part, sums if update.part is None else Sums()
        if update.partial is not None:
            own.merge(update.partial)
        else:
            own.add(contribution(rebased(update, server)))
        extras = {name: update.extras[name] for name in single}
        seen.append(replace(update, state={}, extras=extras, base={}, partial=None))
    if own is not sums:
        sums.merge(own)
    return sums.values, seen


def combine_and_sum(
    rule: CohortRule,
    server: Server,
    updates: Iterator[ClientUpdate],
    contribution: Callable[[ClientUpdate], Tree],
) -> tuple[State, Tree]:
    """Return the model that a rule makes of a round, and the sums of what clients contribute.

    In a round without clients it is the global model, and the sums are empty.
    """
    sums = Sums()

    def passing() -> Iterator[ClientUpdate]:
        for update in updates:
            sums.add(contribution(update))
            yield update

    def rejoined() -> Iterator[ClientUpdate]:
        yield first.pop()  # nobody here holds it while the others arrive
        yield from arriving

    arriving = passing()
    first = list(islice(arriving, 1))
    model = rule.combine(server.of("rule"), rejoined()) if first else server.state
    return model, sums.values


@contextmanager
def timed(server: Server) -> Iterator[None]:
    """Log the time of what is inside as ``server_seconds``."""
    started = time.perf_counter()
    yield
    server.metrics["server_seconds"] = time.perf_counter() - started
