"""Sweeps in processes of their own, and what they leave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.runs.killing import table_of

__all__ = ["SWEEPS", "results_of", "signal_after_progress", "start", "write_sweep"]

SWEEPS = Path(__file__).parents[3] / "configs" / "sweeps"
BASE = str(SWEEPS.parent / "quickstart.yaml")


def write_sweep(name: str, methods: str, more: str = "", seeds: str = "[1]") -> str:
    """Write a sweep of the quickstart, and return the file's name."""
    short = "{trainer.rounds: 1, trainer.max_epochs: 1, data.clients: 3}"
    Path(name).write_text(
        f"config: {BASE}\nseeds: {seeds}\nmethods: {methods}\noverrides: {short}\n{more}\n"
    )
    return name


def start(*args: str) -> "subprocess.Popen[str]":
    """Start ``flsuite sweep`` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "flsuite", "sweep", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def signal_after_progress(
    process: "subprocess.Popen[str]", folder: Path, more: int, number: signal.Signals
) -> str:
    """Send a signal after so many more rounds, and return what the command has printed.

    SIGKILL goes to the whole process group.
    """
    before, deadline = progress_of(folder), time.monotonic() + 300
    while progress_of(folder) < before + more:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    return process.communicate(timeout=300)[0]


def progress_of(folder: Path) -> int:
    """Return the number of rounds in all tables, and of finished cells."""
    tables = [path.read_bytes().splitlines() for path in folder.rglob("metrics.csv")]
    rounds = sum(len({line.split(b",")[0] for line in lines[1:]}) for lines in tables)
    return rounds + len(list(folder.rglob("done.json")))


def results_of(folder: Path) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """Return weights and metrics of each run, without what is measured."""
    return {
        str(run.parent.relative_to(folder)): (
            torch.load(run.parent / "checkpoints" / "last.ckpt", weights_only=True)["federation"][
                "state"
            ],
            table_of(run.parent, "virtual_s"),
        )
        for run in sorted(folder.rglob("metrics.csv"))
    }
