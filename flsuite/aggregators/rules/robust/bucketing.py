"""Bucketing: Karimireddy, He, Jaggi 2022, algorithm 1.

Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, arXiv:2006.09365.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import CohortRule, Rule, RuleAround
from flsuite.aggregators.rules.robust.base import refuse_few
from flsuite.aggregators.rules.robust.cohort import bucket_of, place
from flsuite.arguments import PositiveInt, Settings
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.random import numpy_generator
from flsuite.state import State


@dataclass(frozen=True)
class Bucketing(RuleAround, Settings):
    """A rule on the means of random buckets of clients.

    Clients whose data differs look like attackers to each other. The means of a few of them differ
    less. An attacker spoils its whole bucket, so that the rule must withstand as many buckets as
    there are attackers. With ``size`` 1 it is the rule itself, and with one bucket of all clients
    the plain mean.

    The buckets are drawn anew in each round, by the run's seed. A bucket is an update to the rule:
    the plain mean of the models, of late clients with their changes applied to the global model,
    the mean of the statistics by samples, and the largest staleness. The log has the rule's numbers
    for every client of a bucket, and a bucket's weight in equal parts. For ``n`` clients of ``d``
    parameters the models take ``4 n d`` bytes, and the means ``4 n d / size``.

    Args:
        rule: Any rule, such as a robust one. What it counts, such as ``byzantine``, are buckets.
        size: Clients per bucket, ``s``. The last bucket may have fewer.
        aggregator: The name of ``rule`` in older configs. Exactly one of the two must be given.
    """

    rule: Rule | None = None
    size: PositiveInt = 2
    aggregator: Rule | None = None

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        members = sorted(updates, key=place)
        refuse_few(self, server, len(members))
        rng = numpy_generator(server.tools.seed, "bucketing", server.round)
        order = rng.permutation(len(members)).tolist()
        starts = range(0, len(order), self.size)
        buckets = [sorted(order[start : start + self.size]) for start in starts]
        # By their first clients: buckets of one are the clients in their own order.
        groups = [[members[k] for k in bucket] for bucket in sorted(buckets)]

        members.clear()

        metrics = [[update.metrics for update in group] for group in groups]
        notes = [own[0] if len(own) == 1 else {} for own in metrics]
        for number, note in enumerate(notes):
            note["bucket"] = float(number)
        # Nobody holds the models of a bucket any more once the rule has its mean.
        means = (bucket_of(server, groups.pop(0), note) for note in notes)
        # A part each, so that a linear rule adds them up one by one.
        means = (m if m.part is None else replace(m, part=k) for k, m in enumerate(means))
        model = self.of_inner(server, means)
        for own, note in zip(metrics, notes, strict=True):
            if "weight" in note:
                note["weight"] /= len(own)
            for each in own:
                each.update(note)
        return model

    def too_few(self, updates: int) -> str | None:
        buckets = math.ceil(updates / self.size)
        fault = super().too_few(buckets)
        return fault and f"Bucketing makes {buckets} buckets of {updates} updates, and {fault}"

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return CohortRule.needs | super().needs

    @property
    def withholds(self) -> Mapping[Capability, str]:  # type: ignore[override]
        return {**super().withholds, "a plain sum": "takes the means of random buckets"}

    @property
    def inner(self) -> Rule:
        rule = self.rule or self.aggregator
        assert rule is not None  # __post_init__ has refused
        return rule

    def prepare(self, server: Server) -> None:
        """Refuse a rule that cannot work with means of clients, and what the rule refuses."""
        for name, statistic in self.statistics(server.layout, server.state).items():
            if self.size > 1 and not statistic.is_sum:
                raise FlsuiteError(
                    f"Bucketing: {type(self.inner).__name__} needs every client's own {name}, and "
                    "a bucket has no more than their mean; take another rule, or set size to 1"
                )
        super().prepare(server)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rule is None) == (self.aggregator is None):
            raise FlsuiteError(
                "Bucketing: exactly one of rule and aggregator, its older name, must be given"
            )
