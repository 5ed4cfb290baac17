"""A federated algorithm: four parts, and the order in which they act.

With client k's change ``D_k``, its statistics ``s_k``, weight ``p_k`` and staleness ``t_k``::

    client   train  F_k(w) + objective                      -> D_k, s_k
    client   D_k <- T_n(... T_1(D_k))                       transforms, in order
    server   D_k <- T_1^-1(... T_n^-1(D_k))                 undone, in reverse order
    server   D   <- rule({D_k, p_k, s_k})                   a weighted sum, or a rule over all
    server   D   <- transforms of the aggregate             noise, for example
    server   w   <- server_optimizer(w, D)
"""

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from numbers import Real
from typing import Any, ClassVar, final

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable

from flsuite.aggregators.halves import Halves
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.objectives.checks import wrong
from flsuite.aggregators.part import (
    Capability,
    Named,
    Part,
    Server,
    Statistic,
    model_and_data,
    name_of,
    named,
    refuse_conflicts,
    withheld_from_codecs,
)
from flsuite.aggregators.rules.base import LinearRule, Reduction, Rule
from flsuite.aggregators.rules.mean import Mean
from flsuite.aggregators.server_optimizers import require_step, stepped
from flsuite.aggregators.transforms.base import Transform
from flsuite.common.arguments import arguments, check_init
from flsuite.common.errors import FederationError, FlsuiteError, require_instance
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, cast, divided, scaled


class Aggregator:
    """A federated algorithm, made of four optional parts.

    It contains only settings. Its state between rounds is in :class:`Server`.

    Args:
        rule: How the updates of a round become one model. Default: their mean, weighted by samples.
        objective: A term that clients minimize in addition to their own loss. Default: none.
        transforms: Transforms of a client's change on its way to the server, in this order.
        server_optimizer: Any torch optimizer. Its gradient is the negative change. Its state is in
            the checkpoint. Default: the rule's model becomes the global model.
        private: Prefixes of entries that stay with the clients, in addition to the model's own
            declaration.

    Raises:
        FlsuiteError: If a part has the wrong type.
    """

    pools: ClassVar[bool] = False
    """Whether one fit on the samples of all clients replaces the fits of a cohort."""
    _given: tuple[Named, ...] = ()  # parts set by other keys of the run, such as trainer.attack

    def __init__(
        self,
        rule: Rule | None = None,
        objective: Objective | None = None,
        transforms: list[Transform] | None = None,
        server_optimizer: OptimizerCallable | None = None,
        private: list[str] | None = None,
    ) -> None:
        self.rule = Mean() if rule is None else rule
        self.objective = Objective() if objective is None else objective
        self.transforms = list(transforms or ())
        self.server_optimizer = server_optimizer
        self.private = tuple(private or ())
        check_init(self)
        owner = type(self).__name__
        for transform in self.transforms:
            require_instance(owner, Transform, transforms=transform)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # An override would silently be ignored by workers' partial sums and secure aggregation.
        if own := sorted({"aggregate", "contribution"} & vars(cls).keys()):
            raise FlsuiteError(
                f"{cls.__name__} overrides Aggregator.{own[0]}; write a LinearRule or a "
                "CohortRule, and pass it as rule"
            )

    @staticmethod
    def of(chosen: "Aggregator | Rule") -> "Aggregator":
        """Return the algorithm, or the one of a rule alone."""
        return Aggregator(chosen) if isinstance(chosen, Rule) else chosen

    @property
    def name(self) -> str:
        """Return the name of the preset, or of the rule if this is not a preset."""
        return name_of(self.rule) if type(self) is Aggregator else type(self).__name__

    @property
    def needs(self) -> frozenset[Capability]:
        """Return what it requires of the other parts of a run."""
        # A size that decides who is drawn must not decide again how much a client counts.
        return frozenset({"equal chances"} if self.rule.weighting == "samples" else ())

    def described(self) -> dict[str, Any]:
        """Return the arguments that a config can set, as recorded in a run's settings.

        Values set by a preset itself are excluded, unless the preset does not store its own
        arguments, which only these values show then. If a preset extends an argument, the original
        value is in an attribute with a leading underscore.
        """
        cls: Any = type(self)
        settable, values = _settable(cls), arguments(self)
        known = {name: values[name] for name in settable if name in values}
        if len(known) < len(settable):
            known |= {"rule": self.rule, "objective": self.objective}
        of_base = known.keys() & _settable(Aggregator)
        return known | {name: vars(self).get(f"_{name}", known[name]) for name in of_base}

    def with_parts(self, given: Named, **parts: Any) -> "Aggregator":
        """Return a copy with some parts replaced, by name.

        Args:
            given: The part of the run that requests them, such as an attack.
            parts: The new parts.
        """
        return self.changed(**parts, _given=(*self._given, given))

    def bound(self, model: LightningModule) -> "Aggregator":
        """Return the algorithm for this model.

        Overridden by algorithms that must know its entries, such as its head.

        Raises:
            FlsuiteError: If the model lacks something that the algorithm needs.
        """
        return self

    def changed(self, private: Iterable[str] = (), **parts: Any) -> "Aggregator":
        """Return a copy with more private entries, and with some parts replaced.

        Args:
            private: Prefixes of entries that stay with the clients, in addition to those so far.
            parts: The new parts, by name.
        """
        new = copy.copy(self)
        vars(new).update(parts, private=(*self.private, *private))
        return new

    def named_parts(self) -> list[Named]:
        """Return the parts with their config keys."""
        key = "trainer.aggregator"
        parts = [named(key, self), named(f"{key}.rule", self.rule)]
        parts.append(named(f"{key}.objective", self.objective))
        given = {id(one.part) for one in self._given}
        own = [part for part in self.transforms if id(part) not in given]
        return [*parts, *(named(f"{key}.transforms", part) for part in own), *self._given]

    def prepare(self, server: Server) -> None:
        """Refuse a model or a server that a part cannot work with.

        Raises:
            FlsuiteError: If a part cannot work with it.
        """
        refuse_conflicts([*self.named_parts(), *model_and_data(server)])
        parts: dict[str, Part] = {"rule": self.rule, "objective": self.objective}
        for name, part in (parts | self._placed()).items():
            part.prepare(server.of(name))
        # After the parts have accepted the layout, which their statistics depend on.
        withheld = withheld_from_codecs(self.statistics(server.layout, server.state))
        sent = Named("trainer.aggregator.rule", name_of(self.rule), withholds=withheld)
        refuse_conflicts([sent, *self.named_parts()])
        if self.server_optimizer is not None:
            parameters = [server.state[k] for k in server.layout.parameters if k in server.state]
            require_step(self.server_optimizer, parameters)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return what clients send in addition to their change, by name."""
        own = self.rule.statistics(layout, state), self.objective.statistics(layout, state)
        return self._joined("statistics", *own)

    # The client half

    @property
    def halves(self) -> Halves:
        """Return what the parts do in a client's fit: the objective, and then the rule."""
        return Halves([self.objective.half, self.rule.half])

    def contribution(self, update: ClientUpdate, layout: StateLayout, own: Collection[str]) -> Tree:
        """Return what a client adds to the sums of a round.

        Args:
            update: The update, as the server reads it.
            layout: Names and groups of the shared entries.
            own: Names of the rule's own statistics, which its terms read. The others are summed.

        Raises:
            FlsuiteError: If the rule gives the client an invalid weight.
        """
        weight = self.rule.weight(update)
        if not (isinstance(weight, Real) and 0 <= weight < math.inf):
            raise FlsuiteError(
                f"{type(self.rule).__name__}: the weight of client {update.client} must be a "
                f"finite number of at least 0, got {weight!r}; change its method weight"
            )
        tree: Tree = {"count": 1.0, "weight": weight}
        if statistics := {k: v for k, v in update.extras.items() if k not in own}:
            tree["statistics"] = scaled(statistics, weight)
        if isinstance(self.rule, LinearRule):
            terms: Any = self.rule.terms(update, layout)
            if not isinstance(terms, Mapping):
                raise wrong(self.rule, "terms", terms, "a dictionary of tensors and numbers")
            tree["rule"] = terms
        return tree

    # The server half

    def broadcast(self, server: Server) -> dict[str, Any]:
        """Return what each part sends to every client of the round, in addition to the model."""
        of_rule, of_objective = server.of("rule"), server.of("objective")
        own = self.rule.broadcast(of_rule), self.objective.broadcast(of_objective)
        sent = {"objective": self._joined("broadcast", *own)}
        for name, part in self._placed().items():
            sent[name] = part.broadcast(server.of(name))
        return {name: content for name, content in sent.items() if content}

    def begin(self, server: Server) -> Reduction:
        """Begin a round, whose updates are then added in a fixed order.

        Args:
            server: The server's view of the round.
        """
        own = self.rule.statistics(server.layout, server.state)
        contribution = partial(self.contribution, layout=server.layout, own=own)
        return self.rule.begin(server.of("rule"), contribution)

    def finish(self, server: Server, updates: Reduction) -> State:
        """Return the next global state, computed from the updates of a round.

        Raises:
            FederationError: If there are too few updates for the rule.
        """
        model, sums = updates.finish()
        _require_whole(self.rule, model, server)

        count, statistics = round(sums.get("count", 0)), sums.get("statistics", {})
        means = divided(statistics, sums["weight"]) if count and sums["weight"] > 0 else {}
        self.objective.conclude(server.of("objective"), means, count)
        for name, part in self._placed().items():
            model = part.on_aggregate(server.of(name), model, statistics, count)
            _require_whole(part, model, server)
        if self.server_optimizer is None:
            return cast(model, server.state)
        return stepped(self.server_optimizer, server.of("server_optimizer"), model)

    @final
    def aggregate(self, server: Server, updates: Iterable[ClientUpdate]) -> State:
        """Return the next global state, computed from all updates of a round.

        Args:
            server: The server's view of the round.
            updates: The checked updates, in a fixed order. For a linear rule, they may be partial
                sums.

        Raises:
            FederationError: If there are too few updates for the rule.
        """
        reduction = self.begin(server)
        for update in updates:
            reduction.add(update)
        return self.finish(server, reduction)

    def _joined(self, method: str, of_rule: Any, of_objective: Any) -> dict[str, Any]:
        """Return what the function of the rule and the one of the objective have returned."""
        for part, own in (self.rule, of_rule), (self.objective, of_objective):
            if not isinstance(own, Mapping):
                raise wrong(part, method, own, "a dictionary")
        if both := of_rule.keys() & of_objective.keys():
            raise FlsuiteError(
                f"{name_of(self.rule)} and {name_of(self.objective)} both return {min(both)} from "
                f"{method}; rename one of them"
            )
        return {**of_rule, **of_objective}

    def _placed(self) -> dict[str, Transform]:
        return {f"transforms/{place}": part for place, part in enumerate(self.transforms)}


def _require_whole(part: Part, model: Any, server: Server) -> None:
    """Refuse what a part has returned if it cannot become the next global model."""
    if fault := _incomplete(model, server.state):
        raise FederationError(
            f"round {server.round}: {type(part).__name__} returned a faulty state: {fault}; the "
            f"state of round {server.round - 1} is kept"
        )


def _incomplete(model: Any, state: State) -> str | None:
    """Return why a rule's model cannot become the next global model, or ``None`` if it can."""
    if not isinstance(model, Mapping):
        return f"it is a {type(model).__name__}, not a dict of tensors"
    missing = [name for name in state if name not in model]
    return f"it has no {missing[0]}" if missing else None


@cache
def _settable(cls: type) -> list[str]:
    """Return the names of the arguments that a config can set for a class."""
    return ArgumentParser().add_class_arguments(cls, fail_untyped=False)
