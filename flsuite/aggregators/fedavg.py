"""FedAvg: McMahan et al. 2017, algorithm 1.

Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv:1602.05629.
"""

from collections.abc import Iterator
from typing import Literal, get_args

from flsuite.aggregators.base import Aggregator
from flsuite.errors import require_one_of
from flsuite.messages import ClientUpdate
from flsuite.state import RunningMean, State

__all__ = ["FedAvg", "Weighting"]

Weighting = Literal["samples", "uniform"]


class FedAvg(Aggregator):
    """The mean of the clients' models.

    Args:
        weighting: ``samples`` weights a client by its number of training samples, as the paper
            does. ``uniform`` is the plain mean.
    """

    def __init__(self, weighting: Weighting = "samples") -> None:
        self.weighting = weighting
        require_one_of(type(self).__name__, get_args(Weighting), weighting=weighting)

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        mean = RunningMean()
        for update in updates:
            mean.add(update.state, self.weight(update))
        return mean.mean()

    def weight(self, update: ClientUpdate) -> float:
        """Return the weight of an update in the mean."""
        return update.samples if self.weighting == "samples" else 1.0
