"""Seeds that a sweep adds until its differences are decided."""

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from flsuite.commands.sweeps.plan import label_of
from flsuite.commands.sweeps.queue import Queue
from flsuite.commands.sweeps.reading import Sweep
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import replace_text
from flsuite.runs.record import SWEEP

if TYPE_CHECKING:  # imported late: pandas and matplotlib are not needed by other sweeps
    from flsuite.analysis.sequential import Decision


def grown(sweep: Sweep, folder: Path) -> tuple[Sweep, "list[Decision]"]:
    """Return a sweep with the seeds that its done cells call for, and the decisions if all are.

    It depends on the file and the done cells alone, so that a sweep that was killed, or runs on
    several machines, adds the same seeds.

    Raises:
        FlsuiteError: If the methods have no score in common.
    """
    if sweep.until is None:
        return sweep, []
    own = sweep
    while (queue := Queue(own, folder, retries=False)).is_complete():
        decisions = _decisions(queue, first=max(2, len(sweep.seeds)))
        if all(decision.look.because for decision in decisions):
            return own, decisions
        used = {*own.seeds, *(sweep.tuning.seeds if sweep.tuning else ())}
        added = next(seed for seed in count(max(own.seeds) + 1) if seed not in used)
        own = replace(own, seeds=(*own.seeds, added))
    return own, []


def note_sweep(sweep: Sweep, folder: Path, decisions: "list[Decision]") -> None:
    """Write the order of the methods, and how the sweep was stopped, for reports."""
    content: dict[str, object] = {"methods": [*sweep.methods]}
    if sweep.until and decisions:
        from flsuite.analysis.sequential import record_of

        until = sweep.until
        content["until"] = record_of(decisions, until.seeds, until.alpha, until.width)
    replace_text(json.dumps(content) + "\n", folder / SWEEP)


def _decisions(queue: Queue, first: int) -> "list[Decision]":
    """Return the state of each method against the first one, at each grid point."""
    from flsuite.analysis.sequential import Decision, look

    until, scores = queue.sweep.until, _scores(queue)
    assert until is not None
    baseline = next(iter(queue.sweep.methods))
    pairs = [(method, point) for method, point in scores if method != baseline]
    decisions = []
    for method, point in pairs:
        both = zip(scores[method, point], scores[baseline, point], strict=True)
        # Bonferroni's correction, because any pair may be wrong.
        own = look(
            [ours - theirs for ours, theirs in both],
            first,
            until.seeds,
            until.alpha / len(pairs),
            until.width,
        )
        decisions.append(Decision(f"{method} - {baseline} {point}".strip(), own))
    return decisions


def _scores(queue: Queue) -> dict[tuple[str, str], list[float]]:
    """Return the test scores of the seeds, by method and grid point. A missing one is NaN.

    Raises:
        FlsuiteError: If methods pick their rounds by different scores.
    """
    scores, methods = {}, dict[str, str]()
    for search in queue.searches:
        outcomes = [o for cell in queue.results(search) or [] if (o := queue.outcome(cell))]
        methods |= {outcome.monitor: search.method for outcome in outcomes}
        tests = [math.nan if outcome.test is None else outcome.test for outcome in outcomes]
        scores[search.method, label_of(search.point)] = tests
    if len(methods) > 1:
        names = ", ".join(f"{monitor} of {method}" for monitor, method in methods.items())
        raise FlsuiteError(
            f"until compares one score, but the rounds are picked by {names}; set trainer.monitor "
            "under overrides, in a new folder"
        )
    return scores
