"""Which clients can train, and which of them drop out of a fit."""

from abc import ABC

import numpy as np

__all__ = ["Always", "Availability"]


class Availability(ABC):  # noqa: B024  (every hook has a default)
    """Says which clients can start a fit, and which drop out of one.

    The answers are functions of the run's seed, the virtual time, the client and the number of the
    fit.
    """

    def configure(self, clients: int, seed: int) -> None:
        """Prepare for a run with this number of clients and this seed."""
        return

    def available(self, seconds: float) -> np.ndarray | None:
        """Return which clients can start a fit at this virtual time, bool ``(clients,)``.

        ``None`` stands for all clients, so that a large federation needs no array.
        """
        return None

    def next_start(self, seconds: float) -> float | None:
        """Return the first virtual time after this one at which a client becomes available.

        ``None`` means never.
        """
        return None

    def leaves(self, client: int, number: int, started: float, seconds: float) -> float | None:
        """Return the virtual time at which a client drops out of a fit, ``None`` if it does not.

        Args:
            client: The client's number.
            number: Number of the fit in the run, from 0.
            started: Virtual seconds at the start of the fit.
            seconds: Virtual seconds that the whole fit would take, 0 if they are measured.
        """
        return None


class Always(Availability):
    """All clients are available at any time, and none drops out."""
