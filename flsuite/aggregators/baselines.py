"""The lower and the upper baseline of federated learning: no exchange, and pooled data."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.fedavg import FedAvg
from flsuite.messages import POOLED, ClientUpdate, FitAssignment
from flsuite.state import State

__all__ = ["Centralized", "LocalOnly"]


class LocalOnly(Aggregator):
    """The lower baseline: every client trains alone, and nothing travels."""

    private: ClassVar[tuple[str, ...]] = ("*",)
    accepts_stale: ClassVar[bool] = True  # no model of the server is there to become old

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        for _ in updates:  # an update is checked and recorded when it is taken
            pass
        return global_state


class Centralized(FedAvg):
    """The upper baseline: one model on the pooled data of all clients.

    In each round one fit replaces those of the cohort. It draws batches from the union of all
    clients' training samples, and takes as many steps as the cohort together.
    """

    pooled: ClassVar[bool] = True

    def __init__(self) -> None:
        # Without the argument of FedAvg: there is one update, so that its weight has no effect.
        super().__init__()

    def plan(self, cohort: Sequence[int], batches: Sequence[int]) -> list[FitAssignment]:
        # As many steps as the cohort takes together: the comparison is at equal numbers of steps.
        return [FitAssignment(POOLED, batches=sum(batches))]
