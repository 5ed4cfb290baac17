"""The outcomes of fits as they reach the server."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from flsuite.aggregators.uplink import Uplink
from flsuite.errors import FederationError, FlsuiteError, one_line
from flsuite.messages import (
    Broadcast,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
)
from flsuite.schedules import Schedule
from flsuite.server.devices import Devices
from flsuite.server.round_log import RoundLog
from flsuite.state import nbytes

__all__ = ["Arrivals", "checked"]

log = logging.getLogger("flsuite")


class Arrivals:
    """Takes the outcomes that the server waits for, and refuses the others.

    Args:
        uplink: The way of updates from clients to the server.
        schedule: Who trains when.
        devices: They hold what is to be masked. ``None`` without secure aggregation.
    """

    def __init__(self, uplink: Uplink, schedule: Schedule, devices: Devices | None) -> None:
        self.uplink = uplink
        self.schedule = schedule
        self.devices = devices
        self._awaited: dict[int, FitRequest] = {}

    def expect(self, request: FitRequest) -> None:
        """Wait for the outcome of a fit that starts."""
        self._awaited[request.client] = replace(request, memory={})

    def forget(self) -> None:
        """Wait for nothing, as before the first fit."""
        self._awaited = {}

    def accept(
        self, outcomes: Iterator[Outcome], record: RoundLog
    ) -> Iterator[tuple[FitRequest, Outcome]]:
        """Yield what the server waits for, checked, with what was asked for.

        A faulty update becomes a failure, which names the client and the reason in the log.

        Args:
            outcomes: The outcomes of a round as they arrive.
            record: The record of the round, to which they are added.

        Raises:
            FlsuiteError: At the end, if no client can train with the user's settings.
            FederationError: At the end, if no usable update came back.
        """
        for outcome in outcomes:
            sender = outcome.update if isinstance(outcome, ClientResult) else outcome
            if not self._is_awaited(sender, record):
                _count_refused(sender, record)
                continue

            start = self._awaited.pop(sender.client)
            outcome = checked(outcome, start.broadcast, self.uplink)
            if isinstance(outcome, ClientResult) and self.devices is not None:
                fits = (*self.schedule.ended, *self.schedule.in_flight)
                outcome = self.devices.take(outcome, {fit.client for fit in fits})
            if isinstance(outcome, ClientFailure):
                outcome.number = start.number
                record.lost_down += nbytes(start.broadcast.state) + nbytes(start.broadcast.extras)
                _count_refused(sender, record)
                record.failures.append(outcome)
                where = outcome.round, outcome.client
                log.warning("round %d: client %d failed: %s", *where, outcome.reason)
                log.debug("%s", outcome.details)
            else:
                update = outcome.update
                # 0 in a synchronous round, which is in progress when its updates arrive.
                update.staleness = record.round - start.broadcast.round
                update.number, update.part = start.number, start.part
                record.updates.append(update.without_tensors())
            yield start, outcome

        # At the end: until the last outcome, a usable update may still come.
        if not record.updates and (record.failures or not self.schedule.may_be_empty):
            raise self._failure(record)

    def _is_awaited(self, sender: ClientUpdate | ClientFailure, record: RoundLog) -> bool:
        """Return whether the server waits for a message.

        One that comes a second time, or after its round was closed, is named in the log.
        """
        # A message may claim anything, such as a client that is no number.
        number = sender.number if type(sender.number) is int else None
        start = self._awaited.get(sender.client) if type(sender.client) is int else None
        if start is not None and start.number == number:
            return True

        reason = f"it came too late, after its fit of round {sender.round} was closed"
        if any(update.number == number for update in record.updates):
            reason = "it came a second time"
        what = record.round, sender.client, reason
        log.warning("round %d: a message of client %s was refused: %s", *what)
        return False

    def _failure(self, record: RoundLog) -> Exception:
        """Return the error of a round in which no client came back.

        The user's settings are to blame if every client of the first round failed before its first
        step. After that round, it is known that clients can train.
        """
        failures = record.failures
        if self.devices is not None and (error := self.devices.failure(held=0)):
            return error
        if not failures:
            return FederationError(f"round {record.round}: no client took part")

        first = failures[0]
        if record.round == 1 and all(failure.before_first_step for failure in failures):
            return FlsuiteError(
                f"no client can train: client {first.client} failed before its first step with "
                f"{first.reason}"
            )
        return FederationError(
            f"round {first.round}: all {len(failures)} clients failed, client {first.client} with: "
            f"{first.reason}; the state of round {record.round - 1} is kept"
        )


def checked(outcome: Outcome, broadcast: Broadcast, uplink: Uplink) -> Outcome:
    """Return an outcome unpacked, or a failure if its update must not reach the aggregator.

    Args:
        outcome: What came back.
        broadcast: The version that the client started from.
        uplink: The way of the update to the server.
    """
    if isinstance(outcome, ClientFailure):
        return outcome

    # Checked before the aggregator sees it: one NaN would spoil the mean of all clients.
    update = outcome.update
    try:
        fault = update.fault(reads_numbers=False)
        if fault is None and update.partial is None:
            update = uplink.unpack(update, broadcast.state, broadcast.extras)
            outcome = replace(outcome, update=update)
        fault = fault or outcome.fault()
    except ValueError as error:
        fault = one_line(error)
    except (AttributeError, TypeError, RuntimeError) as error:  # tensors of a foreign kind
        fault = f"it cannot be read ({one_line(error, 200)})"
    if fault is None:
        return outcome
    if fault.startswith("extras"):
        fault += f" ({uplink.aggregator.name} says what clients send, by its parts' statistics)"
    steps = update.steps if type(update.steps) is int and update.steps > 0 else 0
    reason = f"its update was refused: {fault}"
    return ClientFailure(update.client, update.round, reason, steps=steps)


def _count_refused(sender: ClientUpdate | ClientFailure, record: RoundLog) -> None:
    """Count the bytes of an update that has arrived and was refused, if they are a number."""
    if isinstance(sender, ClientUpdate) and isinstance(sender.bytes_up, int):
        record.lost_up += max(sender.bytes_up, 0)
