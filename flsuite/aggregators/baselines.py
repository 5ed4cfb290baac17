"""The floor and the ceiling that every federated method is read against."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.fedavg import FedAvg
from flsuite.messages import POOLED, ClientUpdate, FitAssignment
from flsuite.state import State

__all__ = ["Centralized", "LocalOnly"]


class LocalOnly(Aggregator):
    """No exchange: every client trains alone and nothing travels. The floor."""

    private: ClassVar[tuple[str, ...]] = ("*",)

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        for _ in updates:
            pass
        return global_state


class Centralized(FedAvg):
    """The pooled data of all clients in one place, for the cohort's budget of steps. The ceiling.

    In each round one fit replaces the cohort's: it draws batches from the union of all clients' training samples, and takes
    as many steps as the cohort would have taken together.
    """

    pooled: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()

    def plan(self, cohort: Sequence[int], batches: Sequence[int]) -> list[FitAssignment]:
        return [FitAssignment(POOLED, batches=sum(batches))]
