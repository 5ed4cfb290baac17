"""``flsuite ls``: the list of runs, their contents and their progress."""

import csv
import fcntl
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from flsuite.analysis import list_runs
from flsuite.runs.record import is_finished
from tests.commands.command import Capture, cli, refused
from tests.commands.test_report import settings, write
from tests.conftest import classifier, digits, trainer
from tests.test_imports import HEAVY, imported

ALPHA = {"class_path": "flsuite.data.Dirichlet", "init_args": {"alpha": 0.05}}
RETINA = {
    "class_path": "flsuite.data.MedMNIST",
    "init_args": {"name": "retinamnist", "partition": ALPHA},
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Make a finished run, one that was killed, one that runs, and one that is broken."""
    folder = tmp_path / "runs"
    write(folder / "a", settings(1), [0.1, 0.9, 0.4], [0.5, 0.2, 0.3])
    write(folder / "b", settings(2, "FedAvgM", data=RETINA), [0.2, 0.6])
    write(folder / "c", settings(3, "FedAdam", monitor="loss"), [0.5])
    write(folder / "d", settings(4), [0.5])
    (folder / "d" / "settings.yaml").write_text("seed: [")
    return folder


def table(*args: str, capsys: Capture) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert cli("ls", *args, "--json") == 0
    return json.loads(capsys.readouterr().out)["runs"]


def names(*args: str, capsys: Capture) -> list[str]:
    return [Path(row["run"]).name for row in table(*args, capsys=capsys)]


def test_what_a_run_is_and_how_far_it_has_come(runs: Path, capsys: Capture) -> None:
    descriptor = os.open(runs / "c", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a process that writes to it
    rows = {Path(row["run"]).name: row for row in table(capsys=capsys)}
    os.close(descriptor)

    states = {name: row["state"] for name, row in rows.items()}
    assert states == {"a": "finished", "b": "interrupted", "c": "running", "d": "broken"}
    own = ("run", "method", "data", "partition", "seed", "rounds", "of", "score", "last", "picked")
    assert [rows["a"][key] for key in own] == [
        *("runs/a", "FedAvg", "Digits", "Digits", 1),
        *(3, 3, "accuracy", 0.4, 0.1),
    ]
    assert [rows["b"][key] for key in own[1:7]] == [
        *("FedAvgM", "retinamnist", "Dirichlet(alpha=0.05)", 2, 2, 3)
    ]
    assert (rows["c"]["score"], rows["c"]["last"]) == ("loss", None)
    assert "settings.yaml is not valid YAML" in rows["d"]["error"]


def test_an_extension_that_was_killed_at_once_is_interrupted(
    tmp_path: Path, capsys: Capture
) -> None:
    """The rows and pictures of its earlier end are there, and no callback may have stopped it."""
    run = tmp_path / "runs" / "a"
    trainer(rounds=1, run_dir=run).fit(classifier(), digits())
    assert [row["state"] for row in table(capsys=capsys)] == ["finished"]
    path = run / "settings.yaml"
    extended = yaml.safe_load(path.read_text()) | {"rounds": 5}
    path.write_text(yaml.safe_dump(extended))
    assert [row["state"] for row in table(capsys=capsys)] == ["interrupted"]
    assert not is_finished(run)
    path.write_text(yaml.safe_dump(extended | {"stopping": [{"class_path": "StopAt"}]}))
    assert [row["state"] for row in table(capsys=capsys)] == ["finished"]


def test_a_run_of_a_sweep_that_failed_is_named_with_its_reason(runs: Path, capsys: Capture) -> None:
    (runs / "b" / "failed.txt").write_text("RunFailedError: the mean is not finite\n")
    assert names("--state", "failed", capsys=capsys) == ["b"]
    assert cli("ls", "runs") == 0
    assert "failed: runs/b: RunFailedError: the mean is not finite" in capsys.readouterr().out


def test_the_table_for_people(runs: Path, capsys: Capture) -> None:
    assert cli("ls", "runs", "--method", "FedAvg") == 0
    out = capsys.readouterr().out
    (line,) = [line.split() for line in out.splitlines() if line.strip().startswith("runs/a")]
    assert line[:3] == ["runs/a", "FedAvg", "Digits"] and "finished" in line
    assert line[4:7] == ["3/3", "0.4000", "0.1000"]
    assert "test accuracy" in out and "1 run, 1 finished, 3 hidden" in out

    assert cli("ls", "--state", "broken") == 0
    assert "broken: runs/d: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--method", "fedavg"], ["a"]),
        (["--method", "fedav"], ["a", "b"]),
        (["--data", "retina"], ["b"]),
        (["--partition", "dirichlet", "--method", "FedAvgM"], ["b"]),
        (["--state", "finished"], ["a"]),
        (["--sort", "rounds", "--state", "interrupted"], ["b", "c"]),
        (["--sort", "score", "--state", "interrupted"], ["b", "c"]),
        (["runs/a", "runs/c"], ["a", "c"]),
    ],
)
def test_filters_and_orders(args: list[str], found: list[str], runs: Path, capsys: Capture) -> None:
    assert names(*args, capsys=capsys) == found


def test_the_best_and_the_newest_come_first(tmp_path: Path, capsys: Capture) -> None:
    for place, score in enumerate((0.2, 0.8, 0.5)):
        write(tmp_path / "runs" / f"{score}", settings(place), [score])
        stamp = time.time() - 1000 * place
        os.utime(tmp_path / "runs" / f"{score}" / "metrics.csv", (stamp, stamp))
    assert names("--sort", "score", capsys=capsys) == ["0.8", "0.5", "0.2"]
    assert names("--sort", "age", capsys=capsys) == ["0.2", "0.8", "0.5"]


def test_csv_is_for_other_programs(runs: Path, capsys: Capture) -> None:
    assert cli("ls", "--csv", "--state", "finished") == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["run"], row["method"], float(row["last"])) == ("runs/a", "FedAvg", 0.4)


def test_nothing_to_list_is_one_line(runs: Path, capsys: Capture) -> None:
    assert "no run has method Krum" in refused(capsys, "ls", "--method", "Krum")
    assert "there is no folder nowhere" in refused(capsys, "ls", "nowhere")
    assert "invalid choice: 'done'" in refused(capsys, "ls", "--state", "done")


def test_a_run_that_a_callback_has_ended_is_finished(tmp_path: Path) -> None:
    from flsuite.callbacks import StopAt

    stop = StopAt("accuracy", 0.1)
    made = trainer(rounds=50, run_dir=tmp_path / "run", callbacks=[stop])
    made.fit(classifier(), digits())
    (row,) = list_runs([tmp_path]).to_dict("records")
    assert (row["state"], row["rounds"], row["of"]) == ("finished", made.round, 50)
    assert made.round < 50


@pytest.mark.long
def test_it_starts_without_torch() -> None:
    assert not imported("import flsuite.commands.ls") & (HEAVY - {"numpy"})
