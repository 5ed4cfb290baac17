"""One display for the whole federation."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.messages import Outcome
from flsuite.runs.run import Run

__all__ = ["RoundProgress"]

_SHOWN = ("train/loss", "val/accuracy", "test/accuracy", "test/f1_macro")


class RoundProgress(FederationCallback):
    """Shows rounds, clients of the round, scores and the time left.

    Without a terminal, it prints plain lines.

    Args:
        interval: Smallest number of seconds between two plain lines. The first and the last round
            are always shown.
    """

    affects: ClassVar[Affects] = "nothing"

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._bar: Progress | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoundProgress":
        # A display holds a thread and a lock, which cannot be copied.
        return RoundProgress(self.interval)

    def on_federation_start(self, run: Run) -> None:
        self._first, self._began, self._printed = run.round, time.monotonic(), 0.0
        console = Console(stderr=True)
        if not console.is_terminal:
            return

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )

        self._bar = Progress(*columns, console=console)
        self._rounds = self._bar.add_task("rounds ", total=run.rounds, completed=run.round, note="")
        self._clients = self._bar.add_task("clients", total=None, note="")
        self._bar.start()

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        self._cohort = len(clients)
        if self._bar is not None:
            self._bar.reset(self._clients, total=len(clients))

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        if self._bar is not None:
            self._bar.advance(self._clients)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {metrics[name]:.4f}" for name in _SHOWN if name in metrics)
        left = f"{self._time_left(run, round)} left"
        if self._bar is not None:
            self._bar.update(self._rounds, completed=round, note=f"{shown}  {left}")
            return
        now = time.monotonic()
        if now - self._printed >= self.interval or run.finished:
            self._printed = now
            line = f"round {round}/{run.rounds}  {self._cohort} clients  {shown}  {left}"
            print(line, file=sys.stderr, flush=True)

    def on_federation_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _time_left(self, run: Run, round: int) -> str:
        pace = (time.monotonic() - self._began) / max(round - self._first, 1)
        return str(timedelta(seconds=int(pace * (run.rounds - round))))
