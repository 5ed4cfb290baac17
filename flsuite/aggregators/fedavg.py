"""FedAvg: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, algorithm 1."""

from collections.abc import Iterator
from typing import Literal, get_args

from flsuite.aggregators.base import Aggregator
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.state import RunningMean, State

__all__ = ["FedAvg", "Weighting"]

Weighting = Literal["samples", "uniform"]


class FedAvg(Aggregator):
    """The mean of the clients' models.

    Args:
        weighting: ``samples`` weighs a client by its number of training samples (the paper); ``uniform`` is the plain mean.
    """

    def __init__(self, weighting: Weighting = "samples") -> None:
        if weighting not in get_args(Weighting):
            raise FlsuiteError(
                f"{type(self).__name__}: weighting must be samples or uniform, got {weighting!r}"
            )
        self.weighting = weighting

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        mean = RunningMean()
        for update in updates:
            mean.add(update.state, update.samples if self.weighting == "samples" else 1.0)
        return mean.mean()
