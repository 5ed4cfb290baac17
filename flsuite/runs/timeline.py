"""The fits of a round, as rows of the timeline."""

from collections.abc import Iterator

from flsuite.runs.table import TimelineRow
from flsuite.server.federation import Federation

__all__ = ["timeline_rows"]


def timeline_rows(federation: Federation) -> Iterator[TimelineRow]:
    """Yield the fits that have ended in the round just done, in the order of the clock.

    A pooled fit is not that of a client, and has no row.
    """
    if federation.aggregator.pools:
        return
    updates = {update.number: update for update in federation.log.updates}
    for fit in federation.schedule.ended:
        assert fit.ended is not None
        what = fit.number, fit.client, fit.version, fit.started, fit.ended
        update = updates.get(fit.number)
        if update is not None:
            clock, weight = federation.clock, update.metrics.get("weight")
            merged = clock.round, clock.seconds, update.staleness, weight
            yield TimelineRow(*what, "merged", *merged)
        else:
            # What has arrived and is not among the updates was refused, or never was an update.
            yield TimelineRow(*what, "failed" if fit.outcome == "arrived" else fit.outcome)
