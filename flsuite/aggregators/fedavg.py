"""FedAvg: McMahan et al. 2017, algorithm 1.

Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv:1602.05629.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.parts import mean_by_parts
from flsuite.errors import require_one_of
from flsuite.messages import ClientUpdate
from flsuite.state import State

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
        return self.from_mean(global_state, *mean_by_parts(updates, self.weight))

    def from_mean(self, global_state: State, mean: State, updates: Sequence[ClientUpdate]) -> State:
        return mean

    def summands(self, update: ClientUpdate) -> State:
        weight = self.weight(update)
        floats = {name: w for name, w in update.state.items() if w.is_floating_point()}
        return {name: weight * w.double() for name, w in floats.items()}

    def from_sums(self, global_state: State, sums: State, updates: Sequence[ClientUpdate]) -> State:
        total = sum(self.weight(update) for update in updates)
        # A counter, such as num_batches_tracked, is no sum. It stays as it was.
        return {
            name: (sums[name] / total).to(w.dtype) if name in sums else w.clone()
            for name, w in global_state.items()
        }

    def weight(self, update: ClientUpdate) -> float:
        return update.samples if self.weighting == "samples" else 1.0
