"""Simulated client devices for secure aggregation."""

from collections.abc import Collection

from flsuite.aggregators.exchange.secure import Parties, SecureAggregation, SumReport
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientFailure, ClientResult, Outcome
from flsuite.common.state import State


class Devices:
    """Holds the clients' contributions until all of a round are masked.

    The aggregator never sees a contribution. It receives the sum, computed by the server side of
    the protocol from masked messages.

    Args:
        secure_sum: The protocol.
    """

    def __init__(self, secure_sum: SecureAggregation) -> None:
        self.secure_sum = secure_sum
        self._parties: Parties | None = None  # of the current round
        self._round = 0
        self._faults: dict[int, str] = {}

    def take(self, result: ClientResult, cohort: Collection[int]) -> Outcome:
        """Move a client's contribution to its device, so nothing else holds it.

        Args:
            result: The client's result. The contribution is removed from its memory.
            cohort: All clients of the round, including lost ones.

        Returns:
            The result, or a failure if the contribution cannot be masked.

        Raises:
            FederationError: If the cohort is too small.
        """
        update, unmasked = result.update, result.memory.pop("unmasked", {})
        parties = self._of_round(update.round, cohort)
        try:
            parties.hold(update.client, unmasked)
        except ValueError as error:
            self._faults[update.client] = str(error)
            return ClientFailure(update.client, update.round, str(error))
        return result

    def sums(self, arrived: Collection[int], gone: Collection[int] = ()) -> tuple[State, SumReport]:
        """Return the sum of the clients' contributions, and the costs of the protocol.

        Args:
            arrived: The clients of the round whose contributions are on their devices.
            gone: Clients that are lost after sending their masked contribution.

        Raises:
            FederationError: If too few clients came back or remain, or their contributions cannot
                be masked.
        """
        assert self._parties is not None, "no client of this round has been taken"
        parties, self._parties = self._parties, None
        try:
            return parties.finish(arrived, gone)
        except FederationError as error:
            # Report the masking fault if there is one, not the missing clients.
            raise (self.failure(len(arrived)) or error) from None

    def failure(self, maskable: int) -> Exception | None:
        """Return the error of a round in which too few contributions can be masked.

        It is ``None`` if all can be masked. If none of the first round can, the settings are to
        blame.

        Args:
            maskable: The number of clients whose contributions can be masked.
        """
        if not self._faults:
            return None
        client, fault = next(iter(self._faults.items()))
        what = (
            f"round {self._round}: the contributions of {len(self._faults)} of "
            f"{len(self._faults) + maskable} clients cannot be masked, client {client}: {fault}"
        )
        if self._round == 1 and not maskable:
            return FlsuiteError(what)
        return FederationError(f"{what}; the state of round {self._round - 1} is kept")

    def _of_round(self, round: int, cohort: Collection[int]) -> Parties:
        """Return the devices of a round. They agree on keys on first use."""
        if self._parties is None or self._round != round:
            self._round, self._faults = round, {}
            self._parties = self.secure_sum.begin(sorted(cohort))
        return self._parties
