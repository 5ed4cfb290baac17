"""One fit of one client, as the schedule sees it."""

from dataclasses import dataclass
from typing import Literal

from flsuite.messages import Fault

__all__ = ["Fit", "Outcome"]

Outcome = Literal["arrived", "dropped", "late"]


@dataclass
class Fit:
    """One fit of one client on the virtual clock.

    Attributes:
        number: Number of the fit in the run, from 0.
        client: The client's number.
        version: Version of the global model that it starts from.
        repeat: Fits that the client has started from this version before.
        started: Virtual seconds at its start.
        ended: Virtual seconds at which its update arrives, or at which it drops out or is left out.
            ``None`` until it is known.
        outcome: ``arrived``, ``dropped`` (the client dropped out, and its update never arrives) or
            ``late`` (the round ended without it).
        fault: How it fails on purpose. Default: not at all.
    """

    number: int
    client: int
    version: int
    repeat: int
    started: float
    ended: float | None = None
    outcome: Outcome = "arrived"
    fault: Fault | None = None
