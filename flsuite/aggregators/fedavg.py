"""FedAvg: McMahan et al. 2017, algorithm 1.

Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv:1602.05629.
"""

from typing import Any

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.rules import Mean, Rule, Weighting
from flsuite.aggregators.staleness import Staleness, StalenessName


class FedAvg(Aggregator):
    """The mean of the clients' models.

    Args:
        weighting: ``samples`` weights a client by its number of training samples, as the paper
            does. ``uniform`` is the plain mean.
        staleness: The weight of a client that is late, under an asynchronous schedule.
        rule: Another rule in place of the mean. It has a weighting of its own.
        parts: As for :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(
        self,
        weighting: Weighting = "samples",
        staleness: StalenessName | Staleness = "polynomial",
        rule: Rule | None = None,
        **parts: Any,
    ) -> None:
        self.weighting, self.staleness = weighting, staleness
        super().__init__(rule=rule or Mean(weighting, staleness), **parts)
