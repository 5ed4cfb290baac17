"""Times the steps of clients' fits."""

import math

from lightning.pytorch.profilers import SimpleProfiler

from flsuite.common.arguments import NonNegativeInt, require
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Profile


class ClientProfiler(SimpleProfiler):
    """Sums the calls and the seconds of Lightning's steps over the fits of clients.

    Take it to see where the time of the fits goes.

    Clients train in Lightning's own loop, with the same weights. The run prints one table at its
    end. ``trainer.profiler: simple`` is this profiler of all clients.

    Args:
        client: The client whose fits count. Default: all.
    """

    def __init__(self, client: int | None = None) -> None:
        super().__init__()
        self.client = client
        require("ClientProfiler", NonNegativeInt | None, client=client)

    def __repr__(self) -> str:
        return "ClientProfiler" if self.client is None else f"ClientProfiler({self.client})"

    def require_client(self, clients: int) -> None:
        """Refuse a client that does not exist."""
        if self.client is not None and self.client >= clients:
            raise FlsuiteError(
                f"trainer.profiler: there is no client {self.client}; there are 0 to {clients - 1}"
            )

    def begin(self) -> None:
        """Begin a fit."""
        self.recorded_durations.clear()

    def taken(self, client: int) -> Profile:
        """Return the calls and the seconds of a fit, by step. Empty if the client does not count.

        Args:
            client: The client's number.
        """
        if self.client not in (None, client):
            return {}
        return {name: (len(t), math.fsum(t)) for name, t in self.recorded_durations.items()}

    def describe(self) -> None:
        """Print nothing, because a fit is a part of the run's table."""
