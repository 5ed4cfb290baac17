"""The base class of the objectives."""

from typing import Any

from lightning.pytorch import Callback, LightningModule

from flsuite.aggregators.part import Part, Server, Statistic
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, StateLayout, Tree


class Objective(Part):
    """A term that clients minimize in addition to their own loss.

    The client half consists of callbacks for the client's fit. They change the gradient, may keep
    notes in ``client.memory``, and send statistics in ``client.extras``.
    """

    def check(self, model: LightningModule) -> None:
        """Refuse a model that this objective cannot work with, before round 1.

        Raises:
            FlsuiteError: If it cannot.
        """
        return

    def callbacks(self, client: ClientContext) -> list[Callback]:
        """Return the callbacks of the client half."""
        return []

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        """Return the statistics that every client sends, by name. All of them are summed."""
        return {}

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        """Return the entries in which a client's own model differs from the global model.

        Overridden by algorithms whose clients predict with a model of their own.

        Args:
            state: The shared part of the global model. It must not be changed.
            received: What :meth:`broadcast` sends with it.
            memory: The client's notes. Empty before its first fit.
        """
        return {}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Update the server's memory at the end of a round.

        Args:
            server: Its memory is the objective's.
            means: The weighted means of the statistics, float64. Empty if there are no updates.
            updates: Number of averaged updates.
        """
        return
