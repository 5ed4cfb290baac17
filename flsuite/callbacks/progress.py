"""The progress display of a federation."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.messages import Outcome
from flsuite.common.score_names import shown_number
from flsuite.runs.run import Run

_ALSO_SHOWN = ("test/f1_macro", "test/backdoor_success")


class RoundProgress(FederationCallback):
    """Shows the progress of the run, the clients of the round, scores and the time left.

    Take it to change the bar. Every run has it.

    For asynchronous schedules it also shows virtual time, staleness and the clients in flight.
    Without a terminal it prints plain lines.

    Args:
        interval: Minimum seconds between two plain lines. The first and last rounds are always
            shown.
    """

    affects: ClassVar[Affects] = "nothing"
    reads_updates: ClassVar[bool] = False

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._bar: Progress | None = None
        self._live: Live | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "RoundProgress":
        # A display holds a thread and a lock, which cannot be copied.
        return RoundProgress(self.interval)

    def on_federation_start(self, run: Run) -> None:
        clock = run.federation.clock
        self._first, self._began = run.options.budget.share(clock), time.monotonic()
        self._printed, self._ended, self._updates_before = 0.0, 0, clock.client_updates
        console = Console(stderr=True)
        if not console.is_terminal:
            return

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )

        self._bar = Progress(*columns, console=console)
        # The numbers are on separate lines to fit in 80 characters.
        self._numbers = Text(no_wrap=True, overflow="ellipsis")
        self._rounds = self._bar.add_task("rounds ", total=1.0, done=_done(run), note="")
        self._bar.update(self._rounds, completed=self._first)
        self._clients = self._bar.add_task("clients", total=None, done="", note="")
        self._live = Live(Group(self._bar, self._numbers), console=console, transient=False)
        self._live.start()

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        self._ended, self._updates_before = 0, run.federation.clock.client_updates
        if self._bar is not None:
            # The number of clients in an asynchronous round is not known in advance.
            is_cohort = not run.federation.schedule.is_asynchronous
            self._bar.reset(self._clients, total=len(clients) if is_cohort else None)

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        self._ended += 1
        if self._bar is not None:
            schedule = run.federation.schedule
            in_flight = f"{len(schedule.in_flight)} in flight"
            flying = in_flight if schedule.is_asynchronous else ""
            note = ", ".join(filter(None, (_failed(run), flying)))
            self._bar.update(self._clients, advance=1, done=f"{self._ended}", note=note)

    def on_round_recorded(self, run: Run, round: int, metrics: Mapping[str, float]) -> None:
        monitor = run.summary.monitor
        names = ("train/loss", f"val/{monitor}", f"test/{monitor}", *_ALSO_SHOWN)
        shown_names = dict.fromkeys(name for name in names if name in metrics)
        scores = "  ".join(f"{name} {shown_number(metrics[name])}" for name in shown_names)
        shown = [part for part in (_clock(run, metrics), scores) if part]
        left = f"{self._time_left(run)} left"
        if self._bar is not None:
            share = run.options.budget.share(run.federation.clock)
            self._bar.update(self._rounds, completed=share, done=_done(run), note=left)
            self._numbers.plain = "\n".join(shown)
            return
        now = time.monotonic()
        if now - self._printed >= self.interval or run.finished:
            self._printed = now
            clients = run.federation.clock.client_updates - self._updates_before
            who = "1 client" if clients == 1 else f"{clients} clients"
            who = ", ".join(filter(None, (who, _failed(run))))
            line = "  ".join([f"round {_done(run)}", who, *shown, left])
            print(line, file=sys.stderr, flush=True)

    def on_federation_end(self, run: Run) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = self._bar = None

    def _time_left(self, run: Run) -> str:
        share = run.options.budget.share(run.federation.clock)
        pace = (time.monotonic() - self._began) / max(share - self._first, 1e-9)
        return str(timedelta(seconds=int(pace * (1 - share))))


def _done(run: Run) -> str:
    """Return the rounds done, and the total if it is known."""
    rounds = run.options.budget.rounds
    return str(run.round) if rounds is None else f"{run.round}/{rounds}"


def _failed(run: Run) -> str:
    """Return the number of failed clients in the round, or an empty text."""
    failures = len(run.federation.log.failures)
    return f"{failures} failed" if failures else ""


def _clock(run: Run, metrics: Mapping[str, float]) -> str:
    """Return virtual time, client updates and staleness, if the schedule has virtual time."""
    schedule, clock = run.federation.schedule, run.federation.clock
    if not schedule.is_virtual:
        return ""
    parts = [f"{clock.seconds:.1f} virtual s", f"{clock.client_updates} client updates"]
    if "train/staleness" in metrics:
        mean, largest = metrics["train/staleness"], metrics["train/staleness_max"]
        parts.append(f"staleness {mean:.1f} (max {largest:.0f})")
    return "  ".join(parts)
