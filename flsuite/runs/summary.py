"""The results of a run: the last round, the round picked on validation data, and their cost."""

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from flsuite.common.errors import log
from flsuite.common.messages import Profile
from flsuite.common.score_names import (
    lower_is_better,
    main_scores,
    score_of,
    shown_number,
    shown_score,
    text_table,
)
from flsuite.federation.server.arrivals import RoundLog
from flsuite.runs.record import kept_on_disk

_LONGEST = 15  # steps of a profile
_ADAPTED = {"adapted": "adapted", "unseen": "unseen", "unseen_adapted": "unseen+adapted"}
_SPLITS = {"train": "training", "val": "validation"}
_GUARANTEES = {"epsilon": "epsilon of a client", "sample_epsilon": "epsilon of a sample, largest"}


class RunSummary:
    """The scores of the last round, and of the round picked on validation data.

    Args:
        monitor: The validation score that picks the best round, the first one on a tie.

    Attributes:
        last: Test scores of the last evaluated round, with its number under ``round``.
        best: Test scores of the picked round. Empty without validation data. In a sequence of tasks
            only rounds of the last task can be picked, because scores after different tasks cover
            different classes.
        bytes_up: Bytes sent by clients.
        bytes_down: Bytes received by clients.
        fits: Fits whose outcome has arrived.
        failed: Those that failed or sent a faulty update.
        privacy: Epsilons of the last round and their deltas, if there is a guarantee. They apply to
            the whole run, whichever round is picked.
        ends: Rounds that the run has ended with. A run that was extended has several.
    """

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.bytes_up = 0
        self.bytes_down = 0
        self.fits = 0
        self.failed = 0
        self.privacy: dict[str, float] = {}
        self.ends: list[int] = []
        self._best_value: float | None = None
        self._best_task: int | None = None
        self._began = time.monotonic()

    @property
    def wall_seconds(self) -> float:
        """Return the seconds that the run has taken, including those before a resume."""
        return time.monotonic() - self._began

    def is_best(self, validation: dict[str, float], task: int | None = None) -> bool:
        """Record the validation scores of a round, and return whether they are the task's best."""
        # The sign makes larger values better, also for a loss.
        sign = -1 if lower_is_better(self.monitor) else 1
        value = validation.get(self.monitor, math.nan) * sign
        if math.isnan(value):
            log.warning(
                "%s is undefined on this validation data, or not finite: this round cannot be "
                "picked",
                self.monitor,
            )
            return False

        improved = self._best_value is None or task != self._best_task or value > self._best_value
        if improved:
            self._best_value, self._best_task = value, task
        return improved

    def pick_again(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        """Pick one of a parent's rounds by the monitor of this run.

        Args:
            rounds: The global numbers of each scored round, as ``<split>/<metric>``.
        """
        self.best, self._best_value, self._best_task = {}, None, None
        for round, named in rounds.items():
            val, test = (_of_split(named, split) for split in ("val", "test"))
            task = named.get("train/task")
            if val and self.is_best(val, None if task is None else int(task)):
                self.best = {"round": round, **test}

    def score(self, round: int, test: dict[str, float], is_best: bool) -> None:
        """Record the test scores of a round."""
        self.last = {"round": round, **test}
        if is_best:
            self.best = dict(self.last)

    def record(self, log: RoundLog, named: Mapping[str, float]) -> None:
        """Add the bytes and failures of a round, and the numbers that callbacks have measured.

        Args:
            log: The record of the round. Bytes of unused updates count too.
            named: All numbers of the round, as ``<split>/<metric>``.
        """
        self.bytes_up += log.lost_up + sum(update.bytes_up for update in log.updates)
        self.bytes_down += log.lost_down + sum(update.bytes_down for update in log.updates)
        self.fits += len(log.updates) + len(log.failures)
        self.failed += len(log.failures)

        # Both, because the last round may also be the picked one.
        noted = {n.removeprefix("test/"): v for n, v in named.items() if n.startswith("test/")}
        if not noted:  # the table then has the losses, or the scores on validation data
            noted = {n: named[n] for n in ("train/loss", f"val/{self.monitor}") if n in named}
        for scores in (self.last, self.best):
            if scores.get("round") == log.round:
                scores.update(noted)
        names = [name for epsilon in _GUARANTEES for name in (epsilon, _delta(epsilon))]
        self.privacy = {n: named[f"train/{n}"] for n in names if f"train/{n}" in named}

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the monitor as plain data, with the seconds so far."""
        state = {name: value for name, value in vars(self).items() if name != "monitor"}
        return {**state, "_began": -self.wall_seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`. Wall time continues from there."""
        vars(self).update(state)
        self._began += time.monotonic()


def _of_split(named: Mapping[str, float], split: str) -> dict[str, float]:
    """Return the numbers of a split by metric. Those that are NaN are left out."""
    own = {name.partition("/")[2]: v for name, v in named.items() if name.startswith(f"{split}/")}
    return {name: value for name, value in own.items() if not math.isnan(value)}


def print_summary(summary: RunSummary, folder: Path | None) -> None:
    """Print the final table of a run, and its folder if it has one."""
    columns = [("last round", summary.last)]
    if summary.best:
        columns.append(("picked on validation", summary.best))

    has_scores = any("/" not in name for name in summary.last if name != "round")
    title = "test scores" if has_scores else "without test scores"
    headings = ["", *(f"{title} ({scores.get('round', '-')})" for title, scores in columns)]
    table = text_table(title, headings, (), show_edge=False)
    for label, names in _rows(summary.last, summary.monitor).items():
        cells = [[shown_number(scores[n]) for n in names if n in scores] for _, scores in columns]
        if any(cells):
            table.add_row(label, *map(" / ".join, cells))
    for name, label in _GUARANTEES.items():
        if name in summary.privacy:
            delta = summary.privacy[_delta(name)]
            table.add_row(f"{label}, delta {delta:.3g}", f"{summary.privacy[name]:.4g}")
    traffic = f"{decimal(summary.bytes_up)} / {decimal(summary.bytes_down)}"
    table.add_row("bytes sent, up / down", traffic)
    if summary.failed:
        table.add_row("fits failed", f"{summary.failed} of {summary.fits}")
    table.add_row("seconds", f"{summary.wall_seconds:.1f}")

    if folder is not None and (kept := kept_on_disk(folder))[0]:
        table.add_row("kept rounds, bytes on disk", f"{kept[0]} / {decimal(kept[1])}")

    console = Console()
    console.print(table)
    last = [f"run: {folder}"] if folder is not None else []
    if summary.failed:
        has_tracebacks = folder is not None and any(folder.glob("errors/*.txt"))
        see = ", see errors/" if has_tracebacks else ""
        last.append(f"({summary.failed} of {summary.fits} fits failed{see})")
    if last:
        console.print(" ".join(last), soft_wrap=True)


def print_profile(profile: Profile) -> None:
    """Print where the fits of the clients have spent their time, longest first."""
    steps = sorted(profile.items(), key=lambda row: -row[1][1])[:_LONGEST]
    rows = [
        (escape(name), f"{calls}", f"{seconds:.4f}", f"{seconds / calls:.6f}")
        for name, (calls, seconds) in steps
    ]
    title, headings = "seconds in the fits of clients", ("", "calls", "seconds", "mean")
    Console().print(text_table(title, headings, rows, show_edge=False))


def _rows(names: Iterable[str], monitor: str) -> dict[str, tuple[str, ...]]:
    """Return a mapping from row labels to score names, with the monitor first."""
    monitor = score_of(monitor)  # its statistics over clients have rows of their own
    known = [name for name in names if name != "round"]
    main = main_scores(known, monitor)
    # If clients have models of their own, the score is the mean over them.
    plain = "models' {}, mean" if f"{monitor}_worst" in known else "global {}"
    rows: dict[str, tuple[str, ...]] = {_label(name, plain): (name,) for name in main}
    for name in [name for name in main if name in (monitor, "accuracy", "loss")]:
        shown = shown_score(name)
        rows[f"clients' {shown}, mean/worst"] = f"{name}_client_mean", f"{name}_client_worst"
        rows[f"models' {shown}, worst"] = (f"{name}_worst",)
        rows[f"models' {shown}, first five"] = (f"{name}_first_five",)
    shown = shown_score(monitor)
    for group, label in _ADAPTED.items():
        stem = f"{group}/{monitor}_client"
        rows[f"{label} {shown}, mean/worst"] = f"{stem}_mean", f"{stem}_worst"
    stem = f"all_clients/{monitor}"
    return rows | {
        f"all clients: global {shown}": (stem,),
        f"all clients: models' {shown}, worst": (f"{stem}_worst",),
        f"all clients: {shown}, mean/worst": (f"{stem}_client_mean", f"{stem}_client_worst"),
    }


def _label(name: str, plain: str) -> str:
    """Return the label of a test score, or of a number of another split."""
    split, _, metric = name.partition("/")
    if split in _SPLITS:
        return f"{_SPLITS[split]} {shown_score(metric)}"
    return plain.format(shown_score(name))


def print_scores(scores: Mapping[str, float], split: str, round: int, monitor: str) -> None:
    """Print the global scores of one evaluation as a table, with single classes last."""
    title = f"{split} scores of round {round}"
    table = text_table(title, ("", "value"), (), show_edge=False)
    named = {f"accuracy of class {name.removeprefix('accuracy/')}": name for name in scores}
    by_class = {k: (name,) for k, name in named.items() if name.startswith("accuracy/")}
    for label, names in {**_rows(scores, monitor), **by_class}.items():
        if cell := " / ".join(shown_number(scores[name]) for name in names if name in scores):
            table.add_row(label, cell)
    Console().print(table)


def _delta(epsilon: str) -> str:
    """Return the name of the delta that belongs to an epsilon."""
    return epsilon.replace("epsilon", "delta")
