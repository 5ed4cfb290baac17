"""A run that the system ends, and runs that start together in one folder."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from flsuite.commands import main
from flsuite.commands.process import ending_on_signals
from flsuite.common.errors import FlsuiteError, one_line
from tests.commands.command import QUICKSTART, Capture, cli
from tests.conftest import classifier, digits, equal_states, mostly_long, trainer
from tests.runs.killing import rounds_on_disk

ROUNDS = 12
SMALL = ("--trainer.max_epochs", "1", "--data.clients", "4", "--trainer.evaluate_every", "100")
SLOW = """
import time
from flsuite.callbacks import FederationCallback

class Slow(FederationCallback):
    affects = "nothing"
    reads_updates = False
    def on_round_start(self, run, round, clients):
        time.sleep(0.5 if round > 2 else 0)
"""


def request(folder: Path, engine: str, *more: str) -> list[str]:
    rounds = ("--trainer.rounds", str(ROUNDS), "--trainer.engine", engine)
    return ["fit", "--config", QUICKSTART, *SMALL, *rounds, "--run_dir", str(folder), *more]


def start(cwd: Path, *args: str) -> "subprocess.Popen[str]":
    """Start the command in a process group of its own, with a package of the working folder."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "flsuite", *args],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGHUP, before)


def wait_for_round(folder: Path, process: "subprocess.Popen[str]", round: int) -> None:
    deadline = time.monotonic() + 120
    while rounds_on_disk(folder) < round and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "model.ckpt", weights_only=True)["state_dict"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "number", "status"),
    [
        ("InProcess", signal.SIGTERM, 143),
        ("Processes", signal.SIGTERM, 143),
        ("Processes", signal.SIGHUP, 129),
    ],
)
def test_a_signal_keeps_the_rounds_done_and_has_a_status_of_its_own(
    engine: str, number: int, status: int, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    callbacks = ("--plugins", "[slow]", "--trainer.callbacks+", "slow.Slow")
    process = start(tmp_path, *request(tmp_path / "run", engine, *callbacks))
    wait_for_round(tmp_path / "run", process, 3)
    # As a cluster does: to every process of the job, and again while the run is being closed.
    for _ in range(2):
        os.killpg(process.pid, number)
        time.sleep(0.05)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    last_line = said.splitlines()[-1]
    how = f"flsuite resume {tmp_path / 'run'} continues after the last finished round"
    assert last_line == f"flsuite: error: terminated; {how}"
    assert "Traceback" not in said
    assert 3 <= rounds_on_disk(tmp_path / "run") < ROUNDS
    assert weights(tmp_path / "run"), "the model of the rounds done is there too"

    assert cli(*request(tmp_path / "run", "InProcess", "--ckpt_path", "last")) == 0
    assert cli(*request(tmp_path / "whole", "InProcess")) == 0
    assert equal_states(weights(tmp_path / "run"), weights(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("number", "other", "status"),
    [(signal.SIGTERM, signal.SIGHUP, 143), (signal.SIGHUP, signal.SIGTERM, 129)],
)
def test_a_signal_interrupts_once(number: int, other: int, status: int) -> None:
    # Of a process in the background, SIGHUP may be ignored.
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (number, other)}
    known = {each: signal.getsignal(each) for each in before}
    try:
        with ending_on_signals() as termination:
            assert not termination.status
        assert {each: signal.getsignal(each) for each in before} == known
        with ending_on_signals() as termination:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
            assert termination.status == status
        for each in before:  # ignored until the process ends
            os.kill(os.getpid(), each)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

    thread = threading.Thread(target=ending_on_signals().__enter__)  # which may set no handlers
    thread.start()
    thread.join()
    assert {each: signal.getsignal(each) for each in before} == before


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_on_signals() as termination:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not termination.status
    finally:
        signal.signal(signal.SIGHUP, before)


def race(places: list[str], name: str, ckpt_path: str | None) -> None:
    """Fit in one folder after the other, each at the same moment as the other process."""
    torch.set_num_threads(1)
    for place in map(Path, places):
        made = trainer(rounds=2, run_dir=place / "run")
        model, data = classifier(), digits(clients=3)
        (place / f"ready-{name}").touch()
        while len(list(place.glob("ready-*"))) < 2:
            time.sleep(0.0002)
        try:
            made.fit(model, data, ckpt_path=ckpt_path)
            end = f"{made.round} rounds"
        except FlsuiteError as error:
            end = one_line(error)
        (place / f"end-{name}").write_text(end)


@pytest.mark.parametrize("ckpt_path", mostly_long({"new": None, "last": "last"}, "new"))
def test_of_two_processes_that_start_in_one_folder_one_runs(
    ckpt_path: str | None, tmp_path: Path
) -> None:
    places = [tmp_path / str(number) for number in range(4)]
    for place in places:
        place.mkdir()
    # As daemons, they end with this process if one of them hangs.
    make = partial(multiprocessing.get_context("fork").Process, target=race, daemon=True)
    both = [make(args=([*map(str, places)], name, ckpt_path)) for name in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
        assert process.exitcode == 0

    refusals = []
    for place in places:
        ends = [(place / f"end-{name}").read_text() for name in "ab"]
        refused = [end for end in ends if end != "2 rounds"]
        refusals += refused
        # Who comes when the other one has ended goes on from its checkpoint, if it may.
        assert len(refused) == 1 or (ckpt_path and not refused), ends
        table = (place / "run" / "metrics.csv").read_text().splitlines()
        assert len([line for line in table if ",clients," in line]) == 2, "one run's rows"
    assert refusals, "they have met"
    for line in refusals:
        assert "already holds a run" in line or "another process is writing to" in line, line


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fit", "interrupted; the same command starts again"),
        ("sweep", "interrupted; the same command continues the sweep"),
        ("report", "interrupted"),
    ],
)
def test_only_what_can_go_on_is_said_to(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "dispatch", interrupt)
    assert main.run_command(command, []) == 130
    assert capsys.readouterr().err == f"flsuite: error: {said}\n"
