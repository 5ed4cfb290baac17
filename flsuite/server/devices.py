"""The clients' devices of a secure sum, as a simulation needs them: they hold what is not shown."""

from collections.abc import Sequence
from typing import Any

from flsuite.errors import one_line

SecureSum = Any
from flsuite.messages import ClientFailure, ClientUpdate, Outcome
from flsuite.schedules import Clock
from flsuite.server.round_log import RoundLog
from flsuite.state import State

__all__ = ["Devices"]


class Devices:
    """Holds the clients' summands until all of a round are masked.

    The aggregator never sees them. It receives their sum, which the server has made of masked
    messages.

    Args:
        secure_sum: The protocol. ``None`` holds nothing.
    """

    def __init__(self, secure_sum: SecureSum | None) -> None:
        self.secure_sum = secure_sum
        self._summands: dict[int, State] = {}

    def held(self, outcome: Outcome) -> Outcome:
        """Return the outcome without its summands, which the client's device keeps.

        A device whose summands cannot be masked becomes a failure.
        """
        if self.secure_sum is None or isinstance(outcome, ClientFailure):
            return outcome
        update, summands = outcome.update, outcome.memory.pop("summands")
        try:
            self.secure_sum.check(summands)
        except ValueError as error:
            return ClientFailure(update.client, update.round, one_line(error))
        self._summands[update.client] = summands
        return outcome

    def sums(
        self, arrived: Sequence[ClientUpdate], lost: Sequence[int], log: RoundLog, clock: Clock
    ) -> State:
        """Return the sum of the summands of those that came back, and log what it has cost.

        Raises:
            FederationError: If too few clients came back.
        """
        raise NotImplementedError
