"""Checks of arriving client updates, and the record of a round."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from flsuite.aggregators.exchange.secure import SumReport
from flsuite.aggregators.uplink import Uplink
from flsuite.common.errors import FederationError, FlsuiteError, add_note, some
from flsuite.common.messages import (
    ClientFailure,
    ClientUpdate,
    FitRequest,
    Outcome,
    is_count,
    replaced,
)
from flsuite.federation.schedules.base import Schedule
from flsuite.federation.server.devices import Devices

log = logging.getLogger("flsuite")


@dataclass
class RoundLog:
    """The record of one round, without tensors.

    Attributes:
        round: The round, counted from 1. 0 is before the first one.
        is_asynchronous: Whether the record includes the staleness of updates.
        updates: The accepted updates, without state and extras.
        failures: Clients that failed or were refused.
        server: Metrics of the aggregator.
        lost_down: Bytes received by clients whose update is not used.
        lost_up: Bytes of refused updates.
        is_first: Whether it is the first round that this run trains itself.
    """

    round: int = 0
    is_asynchronous: bool = False
    updates: list[ClientUpdate] = field(default_factory=list)
    failures: list[ClientFailure] = field(default_factory=list)
    server: dict[str, float] = field(default_factory=dict)
    lost_down: int = 0
    lost_up: int = 0
    is_first: bool = False

    @property
    def bytes(self) -> int:
        """Return the bytes sent and received for the accepted updates."""
        return sum(update.bytes_up + update.bytes_down for update in self.updates)

    def metrics(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield scope and metrics, for each client and then for ``global``.

        A global metric is the mean over the clients that have it, weighted by training samples.
        Bytes and steps are totals.
        """
        by_client: dict[int, list[ClientUpdate]] = {}
        for update in self.updates:
            by_client.setdefault(update.client, []).append(update)
        for client, updates in by_client.items():
            yield str(client), self._of_client(updates)

        means = {}
        for name in sorted({name for update in self.updates for name in update.metrics}):
            # Not every client logs every metric, for example a warm-up loss.
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

    def causes(self) -> list[tuple[str, ClientFailure]]:
        """Return a line per cause of failures, with its first client's failure.

        Reasons that differ only in numbers, such as the size of a batch, are alike.
        """
        alike: dict[tuple[str, str], list[ClientFailure]] = {}
        for failure in self.failures:
            text, _, place = failure.reason.rpartition(" (")
            alike.setdefault((re.sub(r"\d+", "0", text), place), []).append(failure)
        return [(self._line(failures), failures[0]) for failures in alike.values()]

    def _line(self, failures: list[ClientFailure]) -> str:
        """Return the line of clients that failed alike."""
        first, many, fits = failures[0], len(failures), len(self.updates) + len(self.failures)
        if many == 1:
            return f"round {first.round}: client {first.client} failed: {first.reason}"
        names = f" ({some([str(one.client) for one in failures], 10)})" if many < fits else ""
        return f"round {self.round}: {many} of {fits} clients failed alike{names}: {first.reason}"

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
        """Return a client's metrics: totals of its work, and means of the rest.

        In asynchronous rounds, a client may come back twice.
        """
        names = dict.fromkeys(name for update in updates for name in update.metrics)
        have = {name: [u.metrics[name] for u in updates if name in u.metrics] for name in names}
        means = {name: sum(values) / len(values) for name, values in have.items()}
        totals = {
            name: sum(getattr(update, name) for update in updates)
            for name in ("steps", "seconds", "bytes_up", "bytes_down")
        }
        ages = [update.staleness for update in updates]
        staleness = {"staleness": sum(ages) / len(ages)} if self.is_asynchronous else {}
        return {**means, "samples": updates[0].samples, **totals, **staleness}

    def _staleness(self) -> dict[str, float]:
        """Return the mean and largest staleness if the schedule is asynchronous."""
        ages = [update.staleness for update in self.updates]
        if not self.is_asynchronous or not ages:
            return {}
        return {"staleness": sum(ages) / len(ages), "staleness_max": float(max(ages))}


class Arrivals:
    """Accepts the outcomes that the server waits for, and refuses the others.

    Args:
        uplink: Packs and unpacks the updates that clients send.
        schedule: Who trains when.
        devices: Simulated devices that hold contributions to be masked. ``None`` without secure
            aggregation.
    """

    def __init__(self, uplink: Uplink, schedule: Schedule, devices: Devices | None) -> None:
        self.uplink = uplink
        self.schedule = schedule
        self.devices = devices
        self._awaited: dict[int, FitRequest] = {}

    def expect(self, request: FitRequest) -> None:
        """Register a fit whose outcome is expected."""
        self._awaited[request.client] = replaced(request, memory={})

    def forget(self) -> None:
        """Clear the expected outcomes, as before the first fit."""
        self._awaited = {}

    def receive(self, outcome: Outcome, record: RoundLog) -> tuple[FitRequest, Outcome] | None:
        """Return an expected outcome as the server reads it, with its request.

        A faulty update becomes a failure.

        Args:
            outcome: An outcome that arrives.
            record: The record of the round. The outcome is added to it.

        Returns:
            ``None`` for a message that the server does not wait for.
        """
        sender = outcome.update if not outcome.failed else outcome
        if not self._is_awaited(sender, record):
            _count_refused(sender, record)
            return None

        start = self._awaited.pop(sender.client)
        outcome = self.uplink.checked(outcome, start.broadcast)
        if not outcome.failed and self.devices is not None:
            fits = (*self.schedule.ended, *self.schedule.in_flight)
            outcome = self.devices.take(outcome, {fit.client for fit in fits})
        if outcome.failed:
            outcome.number = start.number
            record.lost_down += start.broadcast.bytes
            _count_refused(sender, record)
            record.failures.append(outcome)
        else:
            update = outcome.update
            # 0 in a synchronous round, because its updates arrive before it ends.
            update.staleness = record.round - start.broadcast.round
            update.number, update.part = start.number, start.part
            self.schedule.accepted(update)
            record.updates.append(update.without_tensors())
        return start, outcome

    def require_updates(self, record: RoundLog) -> None:
        """Refuse a round in which no usable update arrived, unless its cohort may be empty.

        The log names the clients that failed, and the reasons.

        Raises:
            FlsuiteError: If no client can train with the user's settings.
            FederationError: Otherwise.
        """
        error = None
        may_be_empty = self.schedule.may_be_empty and not record.failures
        if not record.updates and not may_be_empty:
            error = self._failure(record)
        for line, failure in record.causes():
            if failure.reason not in str(error):  # the error says it
                log.warning("%s", line)
            if failure.details:
                log.debug("%s", failure.details)
        if error is not None:
            raise error

    def _is_awaited(self, sender: ClientUpdate | ClientFailure, record: RoundLog) -> bool:
        """Return whether the server waits for a message.

        A duplicate, or a message that arrives after its round was closed, is logged.
        """
        # A message may claim anything, such as a client that is not a number.
        number = sender.number if type(sender.number) is int else None
        start = self._awaited.get(sender.client) if type(sender.client) is int else None
        if start is not None and start.number == number:
            return True

        closed = f"its fit of round {sender.round} was closed"
        reason = f"it came too late, after {closed}, or no fit has its number"
        if any(update.number == number for update in record.updates):
            reason = "it came a second time"
        what = record.round, sender.client, reason
        log.warning("round %d: a message of client %s was refused: %s", *what)
        return False

    def _failure(self, record: RoundLog) -> Exception:
        """Return the error of a round without any usable update.

        The user's settings are to blame if every client of the first round failed before its first
        step. Once a round has succeeded, clients are known to be able to train.
        """
        failures = record.failures
        if self.devices is not None and (error := self.devices.failure(maskable=0)):
            return error
        if not failures:
            return FederationError(f"round {record.round}: no client took part")

        first = failures[0]
        if record.is_first and all(failure.before_first_step for failure in failures):
            error = FlsuiteError(
                f"no client can train: client {first.client} failed before its first step with "
                f"{first.reason}"
            )
            add_note(error, "--debug prints the traceback")
            return error
        lines = [line for line, _ in record.causes()][:3]
        kept = f"the state of round {record.round - 1} is kept"
        return FederationError("; ".join([*lines, kept]))


def _count_refused(sender: ClientUpdate | ClientFailure, record: RoundLog) -> None:
    """Count the bytes of a refused update, if they are a valid number."""
    if isinstance(sender, ClientUpdate) and is_count(sender.bytes_up):
        record.lost_up += sender.bytes_up
