"""The base classes of rules, which combine the updates of a round into one model."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import ClassVar, Literal

from lightning.pytorch import Callback

from flsuite.aggregators.part import Capability, Part, Server, Statistic
from flsuite.aggregators.staleness import rebased
from flsuite.common.messages import ClientContext, ClientUpdate
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


class Rule(Part, ABC):
    """Combines the updates of a round into one model, which the server then moves to.

    It is a :class:`LinearRule`, which needs only sums over clients, or a :class:`CohortRule`. Its
    client half measures statistics after the clients' fits.

    Attributes:
        weighting: Whether clients count by their training samples, or all alike.
    """

    weighting: Weighting = "uniform"
    withholds = withheld_by()

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the callbacks of the client half, which measure the trained model."""
        return []

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return what every client sends in addition to its model, by name."""
        return {}

    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of a client, without damping. Runs in the client half."""
        return 1.0


class LinearRule(Rule):
    """A rule that needs only sums over clients.

    Workers sum over the clients that they train, and secure aggregation computes the sums without
    revealing any client's terms.

    Attributes:
        rebases: Whether the change of a late client is applied to the current global model.
            Otherwise, its terms are those of its own model.
    """

    rebases: ClassVar[bool] = True

    @abstractmethod
    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        """Return a client's terms of the sums: nested dicts of tensors and numbers.

        Floating-point tensors are summed in float64. Integer tensors take their maximum. This runs
        in the client half, and reads what the client sends.

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

    def too_few(self, updates: int) -> str | None:
        """Return why this number of updates is too small, and what to change, or ``None``."""
        return None


class RuleAround(CohortRule):
    """A rule that changes the updates of a round before another rule receives them.

    By default, it has the needs, statistics and withheld capabilities of that rule.

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

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return self.rule.callbacks(client)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return self.rule.statistics(layout, state)

    def weight(self, update: ClientUpdate) -> float:
        return self.rule.weight(update)

    def too_few(self, updates: int) -> str | None:
        return self.rule.too_few(updates) if isinstance(self.rule, CohortRule) else None

    def of_rule(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        """Return the model that the other rule computes from updates."""
        rule = self.rule
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
    """Return the sums of the clients' contributions, and the updates without their models.

    A worker that trains a whole part sends its sum. Rounding depends on the order of summation, so
    the server sums part by part even if it has every update.

    Args:
        rule: The rule. The updates keep its statistics that are not sums.
        server: The server's view.
        updates: The updates.
        contribution: Returns what an update adds to the sums.
    """
    statistics = rule.statistics(server.layout, server.state)
    single = [name for name, statistic in statistics.items() if not statistic.is_sum]
    sums, seen = Sums(), list[ClientUpdate]()
    part, own = None, sums
    for update in updates:
        if update.part != part:
            if own is not sums:
                sums.add(own.values)
            part, own = update.part, sums if update.part is None else Sums()
        if update.partial is not None:
            own.add(update.partial.values)
        else:
            own.add(contribution(rebased(update, server) if rule.rebases else update))
        extras = {name: update.extras[name] for name in single}
        seen.append(replace(update, state={}, extras=extras, base={}, partial=None))
    if own is not sums:
        sums.add(own.values)
    return moved(sums.values, "cpu"), seen  # sums of this process lie where its clients train


def combine_and_sum(
    rule: CohortRule,
    server: Server,
    updates: Iterator[ClientUpdate],
    contribution: Callable[[ClientUpdate], Tree],
) -> tuple[State, Tree]:
    """Return the model that a rule computes from a round, and the sums of the contributions.

    In a round without clients, the model is the global model, and the sums are empty.
    """
    sums = Sums()

    def passing() -> Iterator[ClientUpdate]:
        for update in updates:
            sums.add(contribution(update))
            yield update

    def rejoined() -> Iterator[ClientUpdate]:
        yield first.pop()  # released here while the others arrive
        yield from arriving

    arriving = passing()
    first = list(islice(arriving, 1))
    model = rule.combine(server.of("rule"), rejoined()) if first else server.state
    return model, sums.values


@contextmanager
def timed(server: Server) -> Iterator[None]:
    """Log the duration of the block as ``server_seconds``."""
    started = time.perf_counter()
    yield
    server.metrics["server_seconds"] = time.perf_counter() - started
