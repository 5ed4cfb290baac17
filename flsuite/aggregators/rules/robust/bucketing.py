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
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import numpy_generator
from flsuite.common.state import State


@dataclass(frozen=True)
class Bucketing(RuleAround, Settings):
    """Applies a rule to the means of random buckets of clients.

    Clients with different data look like attackers to each other. The means of a few of them differ
    less. An attacker spoils its whole bucket, so the rule must withstand as many buckets as there
    are attackers. With ``size`` 1, it is the rule itself, and with one bucket of all clients, the
    plain mean.

    The buckets are redrawn in each round, by the run's seed. To the rule, a bucket is an update:
    the plain mean of the models (for late clients, their changes applied to the global model), the
    mean of the statistics by samples, and the largest staleness. The rule's metrics of a bucket are
    logged for each of its clients, and the bucket's weight is split equally. For ``n`` clients of
    ``d`` parameters, the models take ``4 n d`` bytes, and the means ``4 n d / size``.

    Args:
        rule: Any rule, such as a robust one. Its counts, such as ``byzantine``, refer to buckets.
        size: Clients per bucket, ``s``. The last bucket may have fewer.
    """

    rule: Rule
    size: PositiveInt = 2

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        members = sorted(updates, key=place)
        refuse_few(self, server, len(members))
        rng = numpy_generator(server.tools.seed, "bucketing", server.round)
        order = rng.permutation(len(members)).tolist()
        starts = range(0, len(order), self.size)
        buckets = [sorted(order[start : start + self.size]) for start in starts]
        # Sorted by their first clients, so buckets of one keep the clients' order.
        groups = [[members[k] for k in bucket] for bucket in sorted(buckets)]

        members.clear()

        metrics = [[update.metrics for update in group] for group in groups]
        notes = [own[0] if len(own) == 1 else {} for own in metrics]
        for number, note in enumerate(notes):
            note["bucket"] = float(number)
        # The models of a bucket are released once its mean is computed.
        means = (bucket_of(server, groups.pop(0), note) for note in notes)
        # A separate part each, so a linear rule sums them one by one.
        means = (m if m.part is None else replace(m, part=k) for k, m in enumerate(means))
        model = self.of_rule(server, means)
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

    def prepare(self, server: Server) -> None:
        """Refuse a rule that cannot work with means of clients, and run the rule's own checks."""
        for name, statistic in self.statistics(server.layout, server.state).items():
            if self.size > 1 and not statistic.is_sum:
                raise FlsuiteError(
                    f"Bucketing: {type(self.rule).__name__} needs every client's own {name}, but "
                    "a bucket only has their mean; use another rule, or set size to 1"
                )
        super().prepare(server)
