"""The base class of the objectives."""

from typing import Any

from lightning.pytorch import Callback

from flsuite.aggregators.part import Part, Server, Statistic
from flsuite.messages import ClientContext
from flsuite.state import State, StateLayout, Tree


class Objective(Part):
    """What a client minimises beside its own loss.

    The client half is callbacks for the client's fit. They change the gradient, may keep notes in
    ``client.memory``, and send statistics in ``client.extras``.
    """

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the client half."""
        return []

    def broadcast(self, server: Server) -> dict[str, Any]:
        """Return what every client of the round receives as ``client.received``."""
        return {}

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return what every client sends beside its model, by name. All of it is summed."""
        return {}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Change what the server keeps, at the end of a round.

        Args:
            server: Its memory is the objective's.
            means: The weighted means of the statistics, float64. It is empty without updates.
            updates: Number of updates behind the means.
        """
        return
