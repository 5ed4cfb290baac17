"""The record of one round."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from flsuite.messages import ClientFailure, ClientUpdate

__all__ = ["RoundLog"]


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
