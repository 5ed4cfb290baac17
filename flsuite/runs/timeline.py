"""The fits of a round, as rows of the timeline."""

from collections.abc import Iterator

from flsuite.runs.table import TimelineRow
from flsuite.server.federation import Federation

__all__ = ["timeline_rows"]


def timeline_rows(federation: Federation) -> Iterator[TimelineRow]:
    """Yield the fits that have ended in the round just done, in the order of the clock."""
    merged = {update.number: update for update in federation.log.updates}
    failed = {failure.number for failure in federation.log.failures}
    for fit in federation.schedule.ended:
        update = merged.get(fit.number)
        yield TimelineRow(
            fit=fit.number,
            client=fit.client,
            version=fit.version,
            started_s=fit.started,
            ended_s=fit.started if fit.ended is None else fit.ended,
            outcome="failed" if fit.number in failed else "merged" if update else fit.outcome,
            round=federation.round,
            staleness=None if update is None else update.staleness,
            weight=None if update is None else update.metrics.get("weight"),
        )
