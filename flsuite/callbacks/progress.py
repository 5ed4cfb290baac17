"""One display for the whole federation."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flsuite.callbacks.base import FederationCallback
from flsuite.messages import ClientFailure, ClientResult

if TYPE_CHECKING:
    from flsuite.trainer import FederatedTrainer

__all__ = ["RoundProgress"]

_SHOWN = ("train/loss", "val/accuracy", "test/accuracy", "test/f1_macro")


class RoundProgress(FederationCallback):
    """Rounds, clients of the round, current scores and time left; where there is no terminal, plain lines.

    Args:
        interval: At least this many seconds between two plain lines; the first and the last round are always shown.
    """

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._bar: Progress | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoundProgress":
        return RoundProgress(self.interval)

    def on_federation_start(self, trainer: "FederatedTrainer") -> None:
        self._first, self._began, self._printed = trainer.round, time.monotonic(), 0.0
        self._scores = ""
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
        self._rounds = self._bar.add_task(
            "rounds ", total=trainer.rounds, completed=trainer.round, note=""
        )
        self._clients = self._bar.add_task("clients", total=None, note="")
        self._bar.start()

    def on_round_start(
        self, trainer: "FederatedTrainer", round: int, cohort: Sequence[int]
    ) -> None:
        self._cohort = len(cohort)
        if self._bar is not None:
            self._bar.reset(self._clients, total=len(cohort))

    def on_client_end(
        self, trainer: "FederatedTrainer", outcome: ClientResult | ClientFailure
    ) -> None:
        if self._bar is not None:
            self._bar.advance(self._clients)

    def on_round_recorded(
        self, trainer: "FederatedTrainer", round: int, metrics: Mapping[str, float]
    ) -> None:
        shown = [f"{name} {metrics[name]:.4f}" for name in _SHOWN if name in metrics]
        left = self._time_left(trainer, round)
        if self._bar is not None:
            self._bar.update(self._rounds, completed=round, note=f"{'  '.join(shown)}  {left} left")
            return
        now = time.monotonic()
        if now - self._printed >= self.interval or round == trainer.rounds or trainer.should_stop:
            self._printed = now
            print(
                f"round {round}/{trainer.rounds}  {self._cohort} clients  {'  '.join(shown)}  {left} left",
                file=sys.stderr,
                flush=True,
            )

    def on_federation_end(self, trainer: "FederatedTrainer") -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _time_left(self, trainer: "FederatedTrainer", round: int) -> str:
        pace = (time.monotonic() - self._began) / max(round - self._first, 1)
        return str(timedelta(seconds=int(pace * (trainer.rounds - round))))
