"""What an aggregator is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from lightning.pytorch import Callback

from flsuite.messages import ClientContext, ClientUpdate, FitAssignment
from flsuite.state import State, StateLayout

__all__ = ["Aggregator"]


class Aggregator(ABC):
    """One federated algorithm: how updates become the next global model, and what its clients do differently.

    A subclass takes its parameters in ``__init__`` and keeps each under its own name. What it remembers between rounds is
    plain data in :attr:`memory`, which the checkpoint stores; there is nothing else to save.

    Attributes:
        private: Entries of the model that this algorithm keeps with the client, beside those the model declares itself.
        pooled: Whether one fit on everybody's data takes the place of the clients'; then nothing stays with a client.
        memory: What the server remembers: nested dicts of tensors and numbers.
        metrics: Numbers about the round being aggregated, for the log; empty at the start of each.
        layout: Set by :meth:`configure`.
    """

    private: ClassVar[tuple[str, ...]] = ()
    pooled: ClassVar[bool] = False
    layout: StateLayout
    memory: dict[str, Any]
    metrics: dict[str, float]

    def configure(self, layout: StateLayout) -> None:
        """Called once before the first round, or before the memory of a checkpoint is loaded."""
        self.layout = layout
        self.memory = {}
        self.metrics = {}

    def plan(self, cohort: Sequence[int], batches: Sequence[int]) -> list[FitAssignment]:
        """The fits of a round.

        Args:
            cohort: The round's clients, ascending.
            batches: Batches in a local epoch of each of them.
        """
        return [FitAssignment(client) for client in cohort]

    def broadcast(self) -> dict[str, Any]:
        """What travels to every client of the round beside the model; its bytes are counted."""
        return {}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        """The algorithm's client half, as Lightning callbacks for that client's fit."""
        return []

    @abstractmethod
    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        """The next global state.

        Args:
            global_state: What the clients started from, without private entries; not to be changed.
            updates: In a fixed order, each already checked; to be consumed once.
        """

    def state_dict(self) -> dict[str, Any]:
        return self.memory

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory = state
