"""What a run came to: the last round and the round picked on validation data, and what they cost."""

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flsuite.server.evaluation import GLOBAL, Scores
from flsuite.messages import ClientUpdate
from flsuite.metrics import HIGHER_IS_BETTER

__all__ = ["RunSummary", "print_scores"]

log = logging.getLogger("flsuite")

_ROWS = {
    "accuracy": "global accuracy",
    "f1_macro": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "auroc": "AUROC",
    "accuracy_worst": "models' accuracy, worst",
    "accuracy_std": "models' accuracy, spread",
    "accuracy_first_five": "models' accuracy, first five",
    "accuracy_client_mean": "clients' accuracy, mean",
    "accuracy_client_worst": "clients' accuracy, worst",
    "accuracy_client_std": "clients' accuracy, spread",
    "task_accuracy": "accuracy, mean over tasks",
    "forgetting": "forgetting",
    "backward_transfer": "backward transfer",
    "forward_transfer": "forward transfer",
}


class RunSummary:
    """Keeps score over the rounds.

    Args:
        monitor: The score on validation data that picks the best round; the earlier of equals is kept.

    Attributes:
        last: Test scores of the last evaluated round, with its number under ``round``.
        best: Test scores of the round picked on validation data; empty without such data. Of tasks in sequence, only rounds of
            the last one are candidates: scores after different tasks are not of the same classes.
    """

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.last: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.best_value: float | None = None
        self.best_task: int | None = None
        self.bytes_up = 0
        self.bytes_down = 0

    def consider(self, validation: dict[str, float], task: int | None = None) -> bool:
        """Whether this validation score beats all before it, in the same task."""
        value = validation.get(self.monitor, float("nan")) * (1 if HIGHER_IS_BETTER[self.monitor] else -1)
        if math.isnan(value):
            log.warning("%s is not defined on this validation data, or not finite: this round cannot be picked", self.monitor)
            return False
        improved = self.best_value is None or task != self.best_task or value > self.best_value
        if improved:
            self.best_value, self.best_task = value, task
        return improved

    def score(self, round: int, test: dict[str, float], best: bool) -> None:
        self.last = {"round": round, **test}
        if best:
            self.best = dict(self.last)

    def note(self, round: int, test: dict[str, float]) -> None:
        """What callbacks have measured on test data in a round, beside its scores."""
        for found in (self.last, self.best):
            if found.get("round") == round:
                found.update({metric: value for metric, value in test.items() if metric in _ROWS})

    def transfer(self, updates: Iterable[ClientUpdate]) -> None:
        for update in updates:
            self.bytes_up += update.bytes_up
            self.bytes_down += update.bytes_down

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "monitor"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def print(self, seconds: float, folder: Path | None) -> None:
        table = Table(title="test scores", title_justify="left")
        table.add_column("")
        columns = [("last round", self.last)] + ([("picked on validation", self.best)] if self.best else [])
        for title, found in columns:
            table.add_column(f"{title} ({found.get('round', '-')})", justify="right")
        for metric, label in _ROWS.items():
            if any(metric in found for _, found in columns):
                table.add_row(label, *(f"{found[metric]:.4f}" if metric in found else "" for _, found in columns))
        table.add_row("bytes sent, up / down", f"{_size(self.bytes_up)} / {_size(self.bytes_down)}")
        table.add_row("seconds", f"{seconds:.1f}")
        console = Console()
        console.print(table)
        if folder is not None:
            console.print(f"run: {folder}", soft_wrap=True)


def print_scores(found: Scores, split: str, round: int) -> None:
    """The scores of one evaluation as a table: metrics down, federation and clients' summary across."""
    table = Table(title=f"{split} scores of round {round}", title_justify="left")
    table.add_column("")
    table.add_column("value", justify="right")
    for metric, value in found[GLOBAL].items():
        table.add_row(_ROWS.get(metric, metric), f"{value:.4f}")
    Console().print(table)


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
