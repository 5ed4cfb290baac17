"""Bucketing: Karimireddy, He, Jaggi 2022, algorithm 1.

Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, arXiv:2006.09365.
"""

import copy
import math

from flsuite.aggregators.robust.base import RobustAggregator
from flsuite.aggregators.robust.cohort import Cohort
from flsuite.errors import require_instance, require_whole
from flsuite.random import numpy_generator
from flsuite.state import State, StateLayout

__all__ = ["Bucketing"]


class Bucketing(RobustAggregator):
    """A robust rule on the means of random buckets of clients.

    Clients whose data differs look like attackers to each other. The means of a few of them differ
    less. An attacker spoils its whole bucket, so that the rule must withstand as many buckets as
    there are attackers. With ``size`` 1 it is the rule itself, and with one bucket of all clients
    the plain mean.

    The buckets are drawn anew in each round, by the run's seed. The log has the rule's numbers for
    every client of a bucket, and a bucket's weight in equal parts. For ``n``
    clients of ``d`` parameters the models take ``4 n d`` bytes, and the means ``4 n d / size``.

    Args:
        aggregator: The robust rule. What it counts, such as ``byzantine``, are buckets.
        size: Clients per bucket, ``s``. The last bucket may have fewer.
    """

    def __init__(self, aggregator: RobustAggregator, size: int = 2) -> None:
        self.aggregator = aggregator
        self.size = size
        require_instance("Bucketing", RobustAggregator, aggregator=aggregator)
        require_whole("Bucketing", 1, size=size)

    def fold(self, cohort: Cohort) -> State:
        rng = numpy_generator(self.tools.seed, "bucketing", cohort.round)
        order = rng.permutation(len(cohort)).tolist()
        buckets = [
            sorted(order[start : start + self.size]) for start in range(0, len(order), self.size)
        ]
        # By their first clients: buckets of one are the clients in their own order.
        merged = cohort.merged(sorted(buckets))
        merged.note("bucket", map(float, range(len(merged))))
        return self._rule().fold(merged)

    @property
    def accepts_stale(self) -> bool:  # type: ignore[override]
        return self.aggregator.accepts_stale

    def too_few(self, updates: int) -> str | None:
        buckets = math.ceil(updates / self.size)
        fault = self.aggregator.too_few(buckets)
        if fault is None:
            return None
        fault = fault.replace("trainer.aggregator.", "trainer.aggregator.aggregator.")
        return f"Bucketing makes {buckets} buckets of {updates} updates, and {fault}"

    def configure(self, layout: StateLayout) -> None:
        super().configure(layout)
        # On a copy, for what it refuses.
        self._rule().configure(layout)

    def _rule(self) -> RobustAggregator:
        """Return the rule with what the server has, of which workers are sent nothing."""
        rule = copy.copy(self.aggregator)
        rule.tools, rule.layout = self.tools, self.layout
        # The same dicts: what the rule keeps and notes is this one's.
        rule.memory, rule.metrics = self.memory, self.metrics
        return rule
