"""The scores of one round."""

import logging
from typing import Any, Protocol

from flsuite.messages import Split
from flsuite.runs.folder import RunFolder
from flsuite.runs.hooks import Hooks
from flsuite.runs.summary import RunSummary
from flsuite.server.evaluation import GLOBAL, Evaluator
from flsuite.server.federation import Federation

_SPLITS: tuple[Split, ...] = ("val", "test")
_MOST_SCORED = 10_000

log = logging.getLogger("flsuite")


class ScoredRun(Protocol):
    """The part of a :class:`~flsuite.runs.run.Run` that scoring needs."""

    federation: Federation
    folder: RunFolder
    evaluator: Evaluator
    options: Any
    callbacks: Hooks
    summary: RunSummary

    @property
    def round(self) -> int: ...

    @property
    def finished(self) -> bool: ...


def score_round(run: ScoredRun) -> bool:
    """Score a round if it is due, on validation data and then on test data.

    Every evaluation scores the same clients, the first ``score_clients``, so that rounds can be
    compared. The last round also scores all clients, under ``all_clients/...``, if there are not
    more than 10,000: its cost must not follow the number of registered clients. In between,
    ``on_round_end`` is called. At that point ``run.finished`` is known, and numbers still go into
    the round.

    Returns:
        Whether the round is the best so far on validation data.
    """
    improved = has_classes = False
    is_due = run.round % run.options.evaluate_every == 0 or run.finished
    if is_due:
        improved = _score(run, "val")
        has_classes = run.finished  # a callback may stop the run because of the validation scores
        _score(run, "test", improved, details=has_classes)
    run.callbacks.notify("on_round_end", run, run.round)

    if run.finished and not is_due:  # a callback has stopped the run just now
        improved = _score(run, "val")
        _score(run, "test", improved, details=True)
    elif run.finished and not has_classes:
        _note_classes(run)
    if run.finished and run.federation.data.clients > run.options.score_clients:
        _score_all_clients(run)
    return improved


def _score(run: ScoredRun, split: Split, improved: bool = False, details: bool = False) -> bool:
    """Score the constant set of clients.

    The return value says whether the round is the best so far.
    """
    scores = run.evaluator.scores(run.federation, split, _compared_clients(run), details)
    if not scores:
        return improved
    for scope, numbers in scores.items():
        run.folder.table.note(scope, split, numbers)

    if split == "val":
        # Scores after different tasks are of different classes and cannot be compared.
        stage = run.federation.data.at(run.round).stage
        improved = run.summary.is_best(scores[GLOBAL], stage.task if stage else None)
    else:
        run.summary.score(run.round, scores[GLOBAL], improved)
    run.callbacks.notify("on_evaluation_end", run, run.round, split, scores)
    return improved


def _note_classes(run: ScoredRun) -> None:
    """Add the accuracy per class, which only the last round has."""
    compared = _compared_clients(run)
    scores = run.evaluator.scores(run.federation, "test", compared, details=True).get(GLOBAL, {})
    by_class = {name: value for name, value in scores.items() if name.startswith("accuracy/")}
    run.folder.table.note(GLOBAL, "test", by_class)


def _score_all_clients(run: ScoredRun) -> None:
    """Add the scores of all clients under names of their own."""
    clients = run.federation.data.clients
    if clients > _MOST_SCORED:
        log.info(
            "the last round scores the first %d clients one by one; flsuite test scores all %d",
            run.options.score_clients,
            clients,
        )
        return

    compared = {str(client) for client in _compared_clients(run)}
    for split in _SPLITS:
        scores = run.evaluator.scores(run.federation, split, range(clients))
        for scope, numbers in scores.items():
            if scope == GLOBAL:
                named = {f"all_clients/{name}": value for name, value in numbers.items()}
                run.folder.table.note(GLOBAL, split, named)
            elif scope not in compared:
                run.folder.table.note(scope, split, numbers)


def _compared_clients(run: ScoredRun) -> range:
    return range(min(run.options.score_clients, run.federation.data.clients))
