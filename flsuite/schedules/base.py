"""What a schedule is."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from flsuite.messages import ClientUpdate

__all__ = ["Schedule"]


class Schedule(ABC):
    """Says who trains when. What it remembers is plain data in :meth:`state_dict`; a cohort never depends on it."""

    @abstractmethod
    def configure(self, sizes: Sequence[int], seed: int) -> None:
        """Called once before the first round.

        Args:
            sizes: Training samples of each client.
            seed: The run's seed.

        Raises:
            FlsuiteError: If the request gives no client.
        """

    @abstractmethod
    def cohort(self, round: int) -> list[int]:
        """The clients of a round (counted from 1), ascending: a function of seed and round alone."""

    def elapse(self, updates: Sequence[ClientUpdate]) -> float:
        """Virtual seconds that a round took: that of its slowest client, every client having a machine of its own."""
        return max((update.seconds for update in updates), default=0.0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None
