"""The clients' devices of a secure sum, as a simulation needs them."""

import logging
from collections.abc import Collection, Mapping, Sequence

from flsuite.errors import FederationError, FlsuiteError
from flsuite.exchange import Parties, SecureSum, SumReport
from flsuite.messages import ClientFailure, ClientResult, ClientUpdate
from flsuite.server.round_log import RoundLog
from flsuite.state import State

__all__ = ["Devices"]

log = logging.getLogger("flsuite")


class Devices:
    """Holds the clients' summands until all of a round are masked.

    The aggregator never sees a summand. It receives the sum, which the server's side of the
    protocol has made of masked messages.

    Args:
        secure_sum: The protocol.
    """

    def __init__(self, secure_sum: SecureSum) -> None:
        self.secure_sum = secure_sum
        self._summands: dict[int, State] = {}

    def take(self, result: ClientResult) -> None:
        """Take the summands out of what a client keeps, so that nothing else holds them."""
        self._summands[result.update.client] = result.memory.pop("summands", {})

    def sums(
        self, arrived: Sequence[ClientUpdate], cohort: Collection[int], round_log: RoundLog
    ) -> tuple[State, list[ClientUpdate]]:
        """Return the sum of the clients' summands, and the updates that are in it.

        The costs of the protocol are added to the record of the round.

        Args:
            arrived: The updates of the round, without their summands.
            cohort: All clients that have started, with those that were lost.
            round_log: The record of the round.

        Raises:
            FlsuiteError: If no summand of the first round can be masked: a setting is the reason.
            FederationError: If too few clients came back, or their summands cannot be masked.
        """
        summands, self._summands = self._summands, {}
        parties = self.secure_sum.begin(sorted(cohort))
        held, faults = [], {}
        for update in arrived:
            if fault := _hold(parties, update.client, summands.pop(update.client)):
                faults[update.client] = fault
                _leave_out(update, fault, round_log)
            else:
                held.append(update)

        try:
            sums, report = self.secure_sum.finish(parties, [update.client for update in held])
        except FederationError as error:
            # The remedy of the fault, and not that of clients which did not come back.
            raise (_unusable(faults, len(arrived), round_log.round) if faults else error) from None
        _count(report, round_log)
        return sums, held


def _hold(parties: Parties, client: int, summands: State) -> str | None:
    """Leave summands on their device, or return why they cannot be masked."""
    try:
        parties.hold(client, summands)
    except ValueError as error:
        return str(error)
    return None


def _unusable(faults: Mapping[int, str], arrived: int, round: int) -> Exception:
    """Return the error of a round in which too few summands can be masked.

    Args:
        faults: Why they cannot, by client.
        arrived: The number of clients that came back.
        round: The round, from 1.
    """
    client, fault = next(iter(faults.items()))
    what = (
        f"round {round}: the summands of {len(faults)} of {arrived} clients cannot be masked, "
        f"client {client}: {fault}"
    )
    if round == 1 and len(faults) == arrived:
        return FlsuiteError(what)
    return FederationError(f"{what}; the state of round {round - 1} is kept")


def _leave_out(update: ClientUpdate, fault: str, round_log: RoundLog) -> None:
    """Record that a client drops out with its summands."""
    failure = ClientFailure(update.client, update.round, fault, number=update.number)
    round_log.updates[:] = [u for u in round_log.updates if u.client != update.client]
    round_log.failures.append(failure)
    round_log.lost_down += update.bytes_down
    log.warning("round %d: client %d failed: %s", update.round, update.client, fault)


def _count(report: SumReport, round_log: RoundLog) -> None:
    """Add the costs of a secure sum to the record of the round."""
    recorded = {update.client: update for update in round_log.updates}
    for client, cost in report.costs.items():
        sent, received = sum(cost.sent.values()), sum(cost.received.values())
        if client in recorded:
            recorded[client].bytes_up += sent
            recorded[client].bytes_down += received
            recorded[client].metrics["secure_sum_seconds"] = cost.seconds
        else:
            round_log.lost_up += sent
            round_log.lost_down += received
    round_log.server["secure_sum_server_seconds"] = report.server_seconds
    round_log.server["secure_sum_dropped"] = float(len(report.dropped))
