"""Seeds that a sweep adds until its differences are decided."""

import json
import math
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from flsuite.commands.sweeps.plan import Cell, Search, label_of
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
    """Write the order of the methods, and how the sweep was or will be stopped, for reports."""
    content: dict[str, object] = {"methods": [*sweep.methods]}
    if sweep.until:
        content["until"] = {**asdict(sweep.until), "pairs": [*map(asdict, decisions)]}
    path, text = folder / SWEEP, json.dumps(content) + "\n"
    if not path.is_file() or path.read_bytes() != text.encode():
        replace_text(text, path)


def _decisions(queue: Queue, first: int) -> "list[Decision]":
    """Return the state of each method against the first one, at each grid point."""
    from flsuite.analysis.sequential import Decision, look

    until, metric = queue.sweep.until, _metric(queue)
    assert until is not None
    baseline = next(iter(queue.sweep.methods))
    theirs = {s.name: _scores(queue, s) for s in queue.searches if s.method == baseline}
    others = [search for search in queue.searches if search.method != baseline]
    decisions = []
    for search in others:
        point = label_of(search.point)
        both = zip(_scores(queue, search), theirs[f"{baseline} {point}".strip()], strict=True)
        # Bonferroni's correction, because any pair may be wrong.
        alpha = until.alpha / len(others)
        own = look([a - b for a, b in both], first, until.seeds, alpha, until.width)
        place = _results(queue, search)[0].folder.parent.name
        decisions.append(Decision(metric, search.method, baseline, point, place, own))
    return decisions


def _results(queue: Queue, search: Search) -> list[Cell]:
    results = queue.results(search)
    assert results is not None, "all cells are done"
    return results


def _scores(queue: Queue, search: Search) -> list[float]:
    """Return the test scores of the seeds. A missing one is NaN."""
    outcomes = [queue.outcome(cell) for cell in _results(queue, search)]
    return [math.nan if o is None or o.test is None else o.test for o in outcomes]


def _metric(queue: Queue) -> str:
    """Return the score by which all methods pick their rounds.

    Raises:
        FlsuiteError: If they pick by different ones.
    """
    methods = {
        outcome.monitor: search.method
        for search in queue.searches
        for cell in _results(queue, search)
        if (outcome := queue.outcome(cell))
    }
    if len(methods) > 1:
        names = ", ".join(f"{metric} of {method}" for metric, method in methods.items())
        raise FlsuiteError(
            f"until compares one score, but the rounds are picked by {names}; set trainer.monitor "
            "under overrides, in a new folder"
        )
    return next(iter(methods))
