"""Sweeps that add seeds until their differences are decided."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flsuite.analysis.sequential import stopping_of
from flsuite.commands import sweep as command
from flsuite.commands.sweeps.plan import Cell
from flsuite.commands.sweeps.queue import CellOutcome, Queue
from flsuite.commands.sweeps.reading import read_sweep
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import SWEEP
from tests.commands.command import Capture, cli, refused
from tests.commands.sweeps.sweeping import write_sweep

METHODS = "{A: {trainer.aggregator: FedAvg}, B: {trainer.aggregator: FedAvgM}}"
NOISE = [0.03, -0.01, 0.02, -0.02, 0.01, -0.03, 0.02, 0.01]


class Checked:
    """Stands in for the process of the cells."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Checked":
        return self

    def __exit__(self, *_: object) -> None: ...

    def check(self) -> dict[str, Any]:
        return {"refused": [], "workers": 1}


def scored(cell: Cell) -> float:
    """Return the score of a cell. B is 0.05 better, with noise."""
    return 0.5 if cell.method == "A" else 0.55 + NOISE[cell.seed % len(NOISE)]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Return a function that makes cells end at once, up to a kill, and lists their folders."""

    def until(most: int) -> list[str]:
        ended: list[str] = []

        def run(queue: Queue, process: object) -> None:
            while not queue.is_complete():
                with queue.claim() as cell:
                    assert cell is not None
                    queue.begin(cell)
                    if len(ended) >= most:
                        raise KeyboardInterrupt
                    score = scored(cell)
                    queue.finish(cell, CellOutcome(1.0, "accuracy", False, score, score))
                    ended.append(str(cell.folder))

        monkeypatch.setattr(command, "_CellProcess", Checked)
        monkeypatch.setattr(command, "_run", run)
        return ended

    return until


def test_seeds_are_added_until_it_is_decided_also_after_a_kill(
    ends: Callable[[int], list[str]], tmp_path: Path, capsys: Capture
) -> None:
    name = write_sweep("s.yaml", METHODS, seeds="[1, 2]")
    request = "sweep", "--config", name, "--until", "decided"
    whole = ends(999)
    assert cli(*request, "--folder", "whole") == 0
    seeds = len(whole) // 2
    assert 3 < seeds < 20
    out = capsys.readouterr()
    assert "B - A: +0.0" in out.out and f"after {seeds} seeds, differs" in out.out
    assert f"undecided: seed {seeds} is added" in out.err

    first = ends(5)
    assert cli(*request, "--folder", "killed") == 130
    (line,) = stopping_of(["killed"])
    assert "seeds are being added, up to 20" in line
    second = ends(999)
    assert cli(*request, "--folder", "killed") == 0
    assert first + second == whole
    assert Path("killed", SWEEP).read_text() == Path("whole", SWEEP).read_text()
    line, decision = stopping_of(["killed"])
    assert "up to 20" in line and f"after {seeds} seeds" in decision

    third = ends(999)
    assert cli(*request, "--folder", "killed") == 0 and third == []
    assert "nothing to do" in capsys.readouterr().out
    assert cli(*request, "--folder", "killed", "--status") == 0
    assert f"seed {seeds}" in capsys.readouterr().out


def test_a_failed_cell_says_why_no_seeds_are_added(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def run(queue: Queue, process: object) -> None:
        while not queue.is_over_for_now():
            with queue.claim() as cell:
                assert cell is not None
                queue.begin(cell)
                if cell.method == "B":
                    queue.fail(cell, "no memory")
                else:
                    queue.finish(cell, CellOutcome(1.0, "accuracy", False, 0.5, 0.5))

    monkeypatch.setattr(command, "_CellProcess", Checked)
    monkeypatch.setattr(command, "_run", run)
    name = write_sweep("s.yaml", METHODS, seeds="[1, 2]")
    assert cli("sweep", "--config", name, "--folder", "out", "--until", "decided") == 1
    said = capsys.readouterr().err
    assert "2 of 4 cells are not done" in said and "seeds are added only when all" in said


def test_the_file_says_the_maximum_and_the_seeds_of_the_tuning_are_passed_over(
    ends: Callable[[int], list[str]],
) -> None:
    more = "until: {seeds: 4, alpha: 0.0001}"
    tune = "tune: {trials: 1, seeds: [3], common: {model.optimizer.lr: [0.1]}}"
    name = write_sweep("s.yaml", METHODS, f"{more}\n{tune}", seeds="[1, 2]")
    ended = ends(999)
    assert cli("sweep", "--config", name, "--folder", "out") == 0
    results = {Path(folder).name for folder in ended if not folder.startswith("tuning")}
    assert results == {"seed-1", "seed-2", "seed-4", "seed-5"}
    (pair,) = json.loads(Path("out", SWEEP).read_text())["until"]["pairs"]
    assert pair["look"]["because"] == "seeds" and pair["look"]["seeds"] == 4


def test_methods_without_a_common_score_are_refused(
    ends: Callable[[int], list[str]], capsys: Capture
) -> None:
    name = write_sweep("s.yaml", METHODS, seeds="[1]")
    queue = Queue(read_sweep(name), Path("out"))
    for cell, monitor in zip(queue.known(), ("accuracy", "loss"), strict=True):
        queue.begin(cell)
        queue.finish(cell, CellOutcome(1.0, monitor, False, 0.5, 0.5))
    ends(999)
    said = refused(capsys, "sweep", "--config", name, "--folder", "out", "--until", "decided")
    assert "picked by accuracy of A, loss of B; set trainer.monitor" in said


@pytest.mark.parametrize(
    ("methods", "until", "words"),
    [
        ("{A: {}}", "decided", "until needs two methods"),
        (METHODS, "soon", "until must be decided, or a mapping"),
        (METHODS, "{seeds: 2}", "there are 3 seeds already"),
        (METHODS, "{width: 0}", "until: width must be positive"),
        (METHODS, "{with: 0.1}", "did you mean width?"),
    ],
)
def test_a_wrong_request_is_one_line(methods: str, until: str, words: str) -> None:
    name = write_sweep("s.yaml", methods, f"until: {until}", seeds="[1, 2, 3]")
    with pytest.raises(FlsuiteError, match=r"s\.yaml") as error:
        read_sweep(name)
    assert words in str(error.value)
