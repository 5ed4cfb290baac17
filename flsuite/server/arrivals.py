"""The outcomes of fits as they reach the server, and the record of a round."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flsuite.aggregators.uplink import Uplink
from flsuite.errors import FederationError, FlsuiteError
from flsuite.exchange import SumReport
from flsuite.messages import (
    ClientFailure,
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
)
from flsuite.schedules import Schedule
from flsuite.server.devices import Devices
from flsuite.state import nbytes

log = logging.getLogger("flsuite")


@dataclass
class RoundLog:
    """The record of one round, without tensors.

    Attributes:
        round: The round, counted from 1. 0 is before the first one.
        is_asynchronous: Whether the staleness of updates belongs to the record.
        updates: The accepted updates, without state and extras.
        failures: Clients that failed or were refused.
        server: Numbers that the aggregator has noted.
        lost_down: Bytes received by clients whose update is not used.
        lost_up: Bytes of updates that were refused.
    """

    round: int = 0
    is_asynchronous: bool = False
    updates: list[ClientUpdate] = field(default_factory=list)
    failures: list[ClientFailure] = field(default_factory=list)
    server: dict[str, float] = field(default_factory=dict)
    lost_down: int = 0
    lost_up: int = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of the accepted updates, sent and received."""
        return sum(update.bytes_up + update.bytes_down for update in self.updates)

    def metrics(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield scope and numbers, for each client and then for ``global``.

        A global number is the mean by training samples over the clients that have it. Bytes and
        steps are totals.
        """
        by_client: dict[int, list[ClientUpdate]] = {}
        for update in self.updates:
            by_client.setdefault(update.client, []).append(update)
        for client, updates in by_client.items():
            yield str(client), self._of_client(updates)

        means = {}
        for name in sorted({name for update in self.updates for name in update.metrics}):
            # Not every client logs every metric, for example a loss of a warm-up.
            have = [update for update in self.updates if name in update.metrics]
            weighted = sum(update.samples * update.metrics[name] for update in have)
            means[name] = weighted / sum(update.samples for update in have)
        totals = {
            name: float(sum(getattr(update, name) for update in self.updates))
            for name in ("bytes_up", "bytes_down", "steps")
        }
        totals["bytes_down"] += self.lost_down
        totals["bytes_up"] += self.lost_up
        counts = {"clients": len(self.updates), "failed": len(self.failures)}
        yield "global", {**means, **self.server, **totals, **counts, **self._staleness()}

    def count(self, report: SumReport) -> None:
        """Add the costs of secure aggregation."""
        recorded = {update.client: update for update in self.updates}
        for client, cost in report.costs.items():
            sent, received = sum(cost.sent.values()), sum(cost.received.values())
            if client in recorded:
                recorded[client].bytes_up += sent
                recorded[client].bytes_down += received
                recorded[client].metrics["secure_sum_seconds"] = cost.seconds
            else:
                self.lost_up += sent
                self.lost_down += received
        self.server["secure_sum_server_seconds"] = report.server_seconds
        self.server["secure_sum_dropped"] = float(len(report.dropped))

    def _of_client(self, updates: list[ClientUpdate]) -> dict[str, float]:
        """Return a client's numbers: totals of its work, and means of the rest.

        Where rounds do not wait, a client may come back twice in one of them.
        """
        first = updates[0]
        names = dict.fromkeys(name for update in updates for name in update.metrics)
        have = {name: [u.metrics[name] for u in updates if name in u.metrics] for name in names}
        means = {name: sum(values) / len(values) for name, values in have.items()}
        totals = {
            name: sum(getattr(update, name) for update in updates)
            for name in ("steps", "seconds", "bytes_up", "bytes_down")
        }
        ages = [update.staleness for update in updates]
        staleness = {"staleness": sum(ages) / len(ages)} if self.is_asynchronous else {}
        return {**means, "samples": first.samples, **totals, **staleness}

    def _staleness(self) -> dict[str, float]:
        """Return mean and largest staleness, where clients come back to newer versions."""
        ages = [update.staleness for update in self.updates]
        if not self.is_asynchronous or not ages:
            return {}
        return {"staleness": sum(ages) / len(ages), "staleness_max": float(max(ages))}


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
            outcome = self.uplink.checked(outcome, start.broadcast)
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
                self.schedule.accepted(update.number)
                record.updates.append(update.without_tensors())
            yield start, outcome

        # At the end: until the last outcome, a usable update may still come.
        if not record.updates and (record.failures or not self.schedule.declarations.may_be_empty):
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


def _count_refused(sender: ClientUpdate | ClientFailure, record: RoundLog) -> None:
    """Count the bytes of an update that has arrived and was refused, if they are a number."""
    if isinstance(sender, ClientUpdate) and isinstance(sender.bytes_up, int):
        record.lost_up += max(sender.bytes_up, 0)
