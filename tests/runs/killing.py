"""Runs in processes of their own that are killed at random moments."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from flsuite.callbacks import FederationCallback

__all__ = ["Interrupts", "kill_and_resume", "rounds_on_disk", "table_of"]


class Interrupts(FederationCallback):
    """Ends the work of a process where a round begins."""

    affects = "nothing"

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        if round == self.round:
            raise KeyboardInterrupt


def kill_and_resume(
    run: Callable[..., Any], folder: Path, engine: Any, kills: int, rounds: int
) -> Any:
    """Start a run, kill it a number of times, let it finish, and return its trainer.

    Args:
        run: A function of a module, ``run(folder, engine)``, which resumes what it finds.
        folder: The run's folder.
        engine: Where clients train.
        kills: How often the run is killed, each time after at least one more round.
        rounds: Rounds of the run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flsuite.federation.engines.wire", run.__module__])
    dice = random.Random(7)
    killed_at: list[int] = []
    for _ in range(kills):
        child = context.Process(target=run, args=(str(folder), engine))
        child.start()
        _wait_for_progress(folder, child, dice)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        killed_at.append(rounds_on_disk(folder))
    assert killed_at[-1] < rounds, "every kill must hit a run that is still going"
    return run(str(folder), engine)


def table_of(folder: Path, *measured: str) -> pd.DataFrame:
    """Return the metrics of a run without those columns and metrics that are measured."""
    table = pd.read_csv(folder / "metrics.csv")
    rows = table[~table["metric"].isin(["seconds"])]
    return rows.drop(columns=["wall_s", *measured]).reset_index(drop=True)


def _wait_for_progress(folder: Path, child: Any, dice: random.Random) -> None:
    """Wait for the first round that this process finishes, and then for a random time."""
    before, deadline = rounds_on_disk(folder), time.monotonic() + 60
    while rounds_on_disk(folder) <= before and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(dice.uniform(0, 0.15))


def rounds_on_disk(folder: Path) -> int:
    """Return the last round in the table of a run."""
    table = folder / "metrics.csv"
    lines = table.read_text().splitlines() if table.exists() else []
    return (
        int(lines[-1].split(",")[0]) if len(lines) > 1 and lines[-1].split(",")[0].isdigit() else 0
    )
