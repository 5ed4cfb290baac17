"""The interface of a schedule."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from flsuite.engines.base import Engine
from flsuite.messages import Outcome
from flsuite.schedules.clock import Clock

__all__ = ["Schedule"]


class Schedule(ABC):
    """Says who trains when.

    The federation asks twice per aggregation: who starts now, and whose outcomes arrive next. A
    synchronous round starts a cohort and waits for all of it. An asynchronous schedule starts a
    client where another one has come back, and waits for the next outcome, or the next few, by the
    virtual clock. Neither depends on the engine or on the order in which fits finish.
    """

    @abstractmethod
    def configure(self, sizes: Sequence[int], seed: int) -> None:
        """Prepare for a run.

        It is called once before the first round.

        Args:
            sizes: Training samples of each client.
            seed: The run's seed.

        Raises:
            FlsuiteError: If the settings select no client.
        """

    @abstractmethod
    def start(self, clock: Clock) -> list[int]:
        """Return the clients that start training now, from the current version, ascending."""

    @abstractmethod
    def arrivals(self, engine: Engine, clock: Clock) -> Iterator[Outcome]:
        """Yield the outcomes that the next aggregation waits for, in their order.

        At the end, the clock is at the virtual time of the last arrival.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what must be known to resume, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        return
