"""``--json``: one object on the standard output and nothing else, also after a failure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flsuite.commands import main as command
from tests.commands.command import QUICKSTART, Capture, cli
from tests.commands.test_report import settings, write

FIT = [
    *("fit", "--config", QUICKSTART, "--data.train_samples", "300", "--data.clients", "3"),
    *("--trainer.rounds", "2", "--trainer.max_epochs", "1", "--trainer.engine", "InProcess"),
    *("--trainer.schedule.speeds", "Stragglers"),
]
FIRST = {"version", "command", "status", "message"}


def answer(capsys: Capture, *args: str, status: int = 0) -> dict[str, Any]:
    """Return the object that a command prints, without the keys that every object has."""
    capsys.readouterr()
    assert cli(*args, "--json") == status
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    made = json.loads(out)
    assert (made.pop("version"), made.pop("command"), made.pop("status")) == (1, args[0], status)
    assert bool(made["message"]) == bool(status)
    return made


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (1, 2, 3):
        for method, gain in (("FedAvg", 0.0), ("FedAdam", 0.01 * seed)):
            scores = [0.1, 0.5 + gain, 0.4 + gain]
            write(tmp_path / f"{method}-{seed}", settings(seed, method), scores, scores)
    return tmp_path


def test_fit_and_verify(capsys: Capture) -> None:
    fitted = answer(capsys, *FIT, "--run_dir", "run")
    assert fitted.keys() == {
        *("message", "run", "monitor", "last", "picked", "privacy", "bytes_up", "bytes_down")
    }
    table = pd.read_csv("run/metrics.csv").set_index(["round", "scope", "split", "metric"])["value"]
    assert (fitted["run"], fitted["monitor"], fitted["last"]["round"]) == ("run", "accuracy", 2)
    for scores in (fitted["last"], fitted["picked"]):
        kept = table[scores["round"], "global", "test", "accuracy"]
        assert scores["accuracy"] == pytest.approx(kept, abs=1e-8)

    verified = answer(capsys, "verify", "run", "--at", "0", "--rounds", "2")
    rows, states = verified.pop("rows"), verified.pop("states")
    assert rows > 50 and states > 0
    assert verified == {
        "message": "",
        "run": "run",
        "rounds": [1, 2],
        "verdict": "equal",
        "differences": [],
        "largest": 0.0,
        "environment": [],
    }

    numbers = Path("run/metrics.csv")
    lines = numbers.read_text().splitlines()
    lines[5] = lines[5].rpartition(",")[0] + ",0.123"
    numbers.write_text("\n".join(lines) + "\n")
    different = answer(capsys, "verify", "run", "--at", "0", "--rounds", "2", status=1)
    assert different["verdict"] == "different" and "does not verify" in different["message"]
    assert any("value is 0.123, in the replay" in line for line in different["differences"])


def test_a_failed_fit_names_its_run(capsys: Capture) -> None:
    args = [*FIT, "--model.optimizer.lr", "1e38", "--run_dir", "run"]
    assert answer(capsys, *args, status=1)["run"] == "run"


def test_the_option_takes_no_value(capsys: Capture) -> None:
    assert cli("ls", ".", "--json=true") == 2
    assert "--json takes no value; write --json instead of --json=true" in capsys.readouterr().err


def test_a_printed_config_is_a_success(capsys: Capture) -> None:
    assert answer(capsys, *FIT, "--print_config").keys() == {"message"}


def test_ls_and_report(runs: Path, capsys: Capture) -> None:
    listed = answer(capsys, "ls", str(runs), "--method", "FedAdam")
    assert listed.keys() == {"message", "runs"}
    assert [(row["seed"], row["last"], row["state"]) for row in listed["runs"]] == [
        *((seed, pytest.approx(0.4 + 0.01 * seed), "finished") for seed in (1, 2, 3))
    ]
    made = answer(capsys, "report", str(runs), "--metric", "accuracy", "--target", "0.45")
    assert made.keys() == {"message", "scores", "pairs", "targets", "tuning", "notes"}
    assert {row["group"]: row["last"] for row in made["scores"]} == {
        "FedAvg": pytest.approx(0.4),
        "FedAdam": pytest.approx(0.42),
    }
    (pair,) = made["pairs"]
    assert abs(pair["difference"]) == pytest.approx(0.02) and pair["metric"] == "accuracy"
    assert [(row["reached"], row["runs"]) for row in made["targets"]] == [(3, 3), (3, 3)]
    for method in ("FedAvg", "FedAdam"):
        write(runs / "other" / method, settings(1, method, lr=0.2), [0.1, 0.2, 0.3])
    crossed = answer(capsys, "report", str(runs), "--rows", "aggregator", "--columns", "model.lr")
    assert crossed.keys() == {"message", "cells", "notes"} and len(crossed["cells"]) == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fit"], "fit: no config"),
        (
            [*FIT, "--trainer.rouds", "2", "--data.clints", "2"],
            "--trainer.rouds.*\n.*--data.clints",
        ),
        ([*FIT, "--trainer.rounds", "0"], "rounds must be"),
        (["ls", "nothing"], "no run below nothing"),
        (["report", "nothing"], "no run below nothing"),
        (["report", ".", "--nothing"], "unrecognized arguments: --nothing"),
        (["verify", "nothing"], "nothing"),
        (["resume", "nothing"], "nothing"),
    ],
)
def test_a_refusal_has_status_and_message(args: list[str], said: str, capsys: Capture) -> None:
    assert answer(capsys, *args, status=2).keys() == {"message"}
    assert cli(*args, "--json") == 2
    captured = capsys.readouterr()
    lines = [line.removeprefix("flsuite: error: ") for line in captured.err.splitlines()]
    assert json.loads(captured.out)["message"] == "\n".join(lines)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory"),
        (OSError(28, "No space left on device", "x"), 1, "x: No space left"),
    ],
)
def test_a_failure_has_status_and_message(
    error: BaseException, status: int, said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(command, "dispatch", fail)
    assert said in answer(capsys, "ls", status=status)["message"]


def test_an_unexpected_error_is_named_and_raised(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error without a line of the user is a fault of flsuite, and has its traceback."""
    monkeypatch.setattr(command, "dispatch", json.loads)
    with pytest.raises(TypeError):
        command.main(["ls", "--json"])
    captured = capsys.readouterr()
    made = json.loads(captured.out)
    assert made.pop("message").startswith("TypeError: loads() takes 1 positional argument")
    assert made == {"version": 1, "command": "ls", "status": 1}


def test_numbers_that_json_does_not_have_are_null(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"a": [float("nan"), (1.5, float("inf"))], "run": Path("x"), "b": True}
    monkeypatch.setattr(command, "dispatch", lambda *args: made)
    got = answer(capsys, "ls")
    assert got == {"message": "", "a": [None, [1.5, None]], "run": "x", "b": True}


NOISY = """
import os
from flsuite.commands import main

def noisy(*args):
    print("hello")
    os.system("echo hello")
    return {"result": 1}

main.dispatch = noisy
main.console()
"""


def outputs(*command: str) -> tuple[dict[str, Any], str]:
    """Return the object and the standard error of a process of its own."""
    done = subprocess.run([sys.executable, *command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_nothing_else_reaches_the_output_of_the_process() -> None:
    """Neither prints of the user, nor those of a process that inherits the output."""
    made, said = outputs("-c", NOISY, "ls")
    assert made["result"] == 1 and said.count("hello") == 2


@pytest.mark.long
def test_nothing_else_reaches_the_output_of_a_fit_with_workers(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("import os\nprint('hello')\nos.system('echo hello')\n")
    engine = "--trainer.engine", "Processes", "--trainer.engine.workers", "2"
    made, said = outputs("-m", "flsuite", *FIT, *engine, "--plugins", "[noisy]")
    assert made["last"]["round"] == 2 and "hello" in said and "test scores" in said
