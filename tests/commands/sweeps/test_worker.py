"""Workers and their cells as processes. What they run is a stand-in."""

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from flsuite.commands import cells
from flsuite.commands.sweeps.queue import Queue
from flsuite.commands.sweeps.status import failures
from tests.commands.sweeps.working import SWEEP


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the workers, and wait until only the endless cell is left."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "tests.commands.sweeps.working", str(tmp_path)]
    process = subprocess.Popen(command, cwd=root)
    deadline = time.monotonic() + 60
    while Queue(SWEEP, tmp_path, retries=False).counts()["failed"] < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


def family_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3  # two workers, and a cell
    return family


def test_a_cell_that_fails_or_dies_stops_nobody(
    at_work: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    queue = Queue(SWEEP, tmp_path, retries=False)
    lines = failures(queue)
    assert len(lines) == 2
    assert "failing seed 1: it cannot (" in lines[0] and "log.txt" in lines[0]
    assert "killed seed 1: it was killed by SIGKILL" in lines[1]
    assert queue.counts() == {"done": 1, "failed": 2, "running": 1, "waiting": 0}


def test_sigterm_ends_all_and_marks_nothing(
    at_work: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    family = family_of(at_work)
    at_work.send_signal(signal.SIGTERM)
    assert at_work.wait(60) == 0
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert Queue(SWEEP, tmp_path, retries=False).counts()["waiting"] == 1


def test_a_closed_terminal_ends_cells_by_the_command_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> NoReturn:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "it would kill the runs"
        raise EOFError

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setattr(pickle, "load", read)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    try:
        with pytest.raises(EOFError):
            cells.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a cell in progress ends by itself")
def test_cells_die_with_those_who_started_them(
    at_work: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    family = family_of(at_work)
    os.kill(at_work.pid, signal.SIGKILL)
    at_work.wait()
    assert not psutil.wait_procs(family, timeout=60)[1]
    # The kernel has freed the lock.
    assert Queue(SWEEP, tmp_path, retries=False).counts()["waiting"] == 1
