"""The base class of the objectives."""

from typing import Any

from lightning.pytorch import Callback

from flsuite.aggregators.part import Part, Server, Statistic
from flsuite.messages import ClientContext
from flsuite.state import State, StateLayout, Tree


class Objective(Part):
    """A term that clients minimize in addition to their own loss.

    The client half consists of callbacks for the client's fit. They change the gradient, may keep
    notes in ``client.memory``, and send statistics in ``client.extras``.
    """

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the callbacks of the client half."""
        return []

    def broadcast(self, server: Server) -> dict[str, Any]:
        """Return what every client of the round receives as ``client.received``."""
        return {}

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return the statistics that every client sends, by name. All of them are summed."""
        return {}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Update the server's memory at the end of a round.

        Args:
            server: Its memory is the objective's.
            means: The weighted means of the statistics, float64. Empty if there are no updates.
            updates: Number of averaged updates.
        """
        return
