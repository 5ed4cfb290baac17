"""A folder of cells: who runs which, what is done, what the tuning chooses. Nothing is trained."""

import csv
import json
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flsuite.commands.sweeps import status
from flsuite.commands.sweeps.plan import Cell, draw
from flsuite.commands.sweeps.queue import CellOutcome, Queue, measure, seconds_so_far
from flsuite.commands.sweeps.reading import Sweep, Tuning
from flsuite.commands.sweeps.status import (
    SweepProgress,
    estimate,
    failures,
    print_cells,
    print_status,
)
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import TUNING_COLUMNS
from tests.analysis.made_runs import Row, made_run, settings
from tests.commands.command import Capture

SWEEP = Sweep(
    name="s",
    config=Path("base.yaml"),
    base={},
    seeds=(1, 2),
    methods={"A": {}, "B": {"trainer.aggregator": "B"}},
    grid={"data.alpha": [0.1, 1.0]},
)
TUNED = replace(SWEEP, tuning=Tuning(2, (8, 9), 0, {"A": {}, "B": {"trainer.mu": [0.0, 0.5, 1.0]}}))


def outcome(val: float | None = 0.5, lower: bool = False, seconds: float = 2.0) -> CellOutcome:
    return CellOutcome(seconds, "loss" if lower else "accuracy", lower, val, 0.4)


def run_all(queue: Queue, val: float = 0.5) -> list[Cell]:
    """Finish all cells that can be claimed, and return them."""
    finished = []
    while True:
        with queue.claim() as cell:
            if cell is None:
                return finished
            queue.begin(cell)
            queue.finish(cell, outcome(val))
            finished.append(cell)


def test_every_cell_is_claimed_once(tmp_path: Path) -> None:
    mine, theirs = Queue(SWEEP, tmp_path), Queue(SWEEP, tmp_path)
    with ExitStack() as stack:
        claimed = [stack.enter_context(q.claim()) for q in (mine, theirs) * 4]
        assert len(set(claimed)) == 8 == mine.size and None not in claimed
        assert [stack.enter_context(q.claim()) for q in (mine, theirs)] == [None, None]
        assert mine.counts()["running"] == 8 and not mine.is_over_for_now()
    assert mine.counts()["waiting"] == 8  # nobody has finished them


def test_models_are_merged_after_they_are_trained(tmp_path: Path) -> None:
    queue = Queue(replace(SWEEP, updates_from="B"), tmp_path)
    finished = run_all(queue)
    assert len(finished) == 8
    assert all(c.source in finished[: finished.index(c)] for c in finished if c.method == "A")


def test_processes_never_share_a_cell(tmp_path: Path) -> None:
    read, write = os.pipe()
    workers = []
    for _ in range(4):
        child = os.fork()
        if not child:
            try:
                names = [str(cell.folder) for cell in run_all(Queue(SWEEP, tmp_path))]
                os.write(write, "".join(f"{name}\n" for name in names).encode())
            finally:
                os._exit(0)
        workers.append(child)
    for child in workers:
        os.waitpid(child, 0)
    os.close(write)
    with open(read) as file:
        ran = file.read().splitlines()
    assert len(ran) == len(set(ran)) == 8
    assert Queue(SWEEP, tmp_path).is_complete()


def test_early_results_compare_all_methods(tmp_path: Path) -> None:
    cells = Queue(SWEEP, tmp_path).known()
    assert [cell.seed for cell in cells] == [1] * 4 + [2] * 4
    names = {f"{method} alpha={alpha}" for method in "AB" for alpha in (0.1, 1.0)}
    assert {cell.name for cell in cells[:4]} == names


def test_a_failed_cell_is_tried_again_by_the_next_start_alone(tmp_path: Path) -> None:
    queue, other = Queue(SWEEP, tmp_path), Queue(SWEEP, tmp_path)
    with queue.claim() as cell:
        assert cell is not None
        queue.begin(cell)
        queue.fail(cell, "it cannot")
    assert queue.state(cell) == "failed" and "it cannot" in failures(queue)[0]
    for process in (queue, other):  # both have started before it failed
        assert cell not in run_all(process)
        assert process.is_over_for_now() and not process.is_complete()
    again = Queue(SWEEP, tmp_path)
    assert run_all(again) == [cell] and again.is_complete() and not failures(again)


def test_a_deleted_folder_is_run_again(tmp_path: Path) -> None:
    cell, *_ = run_all(Queue(SWEEP, tmp_path))
    (tmp_path / cell.folder / "done.json").unlink()
    assert run_all(Queue(SWEEP, tmp_path)) == [cell]


def test_a_damaged_mark_is_named(tmp_path: Path) -> None:
    cell, *_ = run_all(Queue(SWEEP, tmp_path))
    (tmp_path / cell.folder / "done.json").write_text('{"seconds": ')
    with pytest.raises(FlsuiteError, match=r"done.json is damaged; delete it"):
        Queue(SWEEP, tmp_path).counts()


def test_damaged_files_of_a_cell_are_named_and_end_no_worker(tmp_path: Path) -> None:
    made_run(tmp_path / "run", settings("FedAvg", 1), [("global", "test", "accuracy", [0.5])])
    assert (seconds_so_far(tmp_path / "run"), measure(tmp_path / "run", 1.0).test) == (3.0, 0.5)
    for content in (b"trainer: [", b"\xff", b"", b"seed: x"):
        (tmp_path / "run" / "settings.yaml").write_bytes(content)
        with pytest.raises(FlsuiteError, match=r"settings\.yaml (is not valid YAML|does not hold)"):
            measure(tmp_path / "run", 1.0)
    (tmp_path / "run" / "metrics.csv").write_bytes(b"round,wall_s\n1,\xff\n")
    assert seconds_so_far(tmp_path / "run") == 0.0


def test_the_score_is_the_one_that_picks_the_runs_round(tmp_path: Path) -> None:
    """The run has derived it: personal models are picked by the mean over clients."""
    rows: list[Row] = [
        ("global", split, metric, values)
        for split in ("val", "test")
        for metric, values in {"accuracy": [0.5, 0.2], "accuracy_client_mean": [0.6, 0.9]}.items()
    ]
    content = settings("Ditto", 1, monitor="accuracy_client_mean")
    found = measure(made_run(tmp_path / "run", content, rows), 1.0)
    assert found == CellOutcome(1.0, "accuracy_client_mean", False, 0.9, 0.9)


def test_a_grid_names_the_scores_of_its_methods(tmp_path: Path, capsys: Capture) -> None:
    queue = Queue(replace(SWEEP, grid={}), tmp_path)
    for cell in queue.known():
        queue.begin(cell)
        monitor = "accuracy" if cell.method == "A" else "accuracy_client_mean"
        queue.finish(cell, replace(outcome(), monitor=monitor))
    print_status(queue)
    out = " ".join(capsys.readouterr().out.split())
    assert "test accuracy of A; accuracy_client_mean of B, in the round picked" in out


def test_the_estimate_is_the_time_of_the_method(tmp_path: Path) -> None:
    queue = Queue(replace(SWEEP, workers=2), tmp_path)
    assert "not known before the first cell" in estimate(queue)
    a, b, *_ = queue.known()
    for cell, seconds in ((a, 10.0), (b, 100.0)):
        queue.begin(cell)
        queue.finish(cell, outcome(seconds=seconds))
    assert "about 0:02:45 with 2 at the same time" in estimate(queue)  # (3 * 10 + 3 * 100) / 2


def test_the_bar_counts_failed_cells_and_those_that_are_tried_again_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(status, "Console", lambda **_: console)
    sweep = replace(SWEEP, grid={}, seeds=(1,))
    for line in ("first", "second"):
        queue = Queue(sweep, tmp_path)
        with SweepProgress(queue) as progress, queue.claim() as cell:
            assert cell is not None
            queue.begin(cell)
            queue.fail(cell, line)
            progress.look()
            assert queue.ended == 1
            with queue.claim() as other:
                assert other is not None
                queue.begin(other)
                queue.fail(other, line)
        assert queue.ended == 2 == queue.size and "0:00:00 left" not in screen.getvalue()
        shown = screen.getvalue().replace("\x1b[", " ")
        assert "2/2" in shown and "2 failed" in shown
        assert shown.count(f"failed: {line}") == 2
        screen.truncate(0)


def test_cells_that_end_together_are_counted_one_by_one(tmp_path: Path, capsys: Capture) -> None:
    queue = Queue(replace(SWEEP, grid={}), tmp_path)
    with SweepProgress(queue):
        for cell in queue.known()[:2]:
            queue.begin(cell)
            queue.finish(cell, outcome())
    counted = re.findall(r"^(\d)/4  ", capsys.readouterr().err, re.MULTILINE)
    assert counted == ["1", "2"]


def words(capsys: Capture) -> str:
    """Return what was printed, without the lines and widths of tables."""
    return " ".join(re.sub("[┃│]", " ", capsys.readouterr().out).split())


def test_the_state_of_each_cell_is_printed(tmp_path: Path, capsys: Capture) -> None:
    queue = Queue(replace(SWEEP, grid={}), tmp_path)
    print_status(queue)
    assert "A waiting waiting" in (text := words(capsys)) and "0 of 4 cells are done" in text
    first, second, *_ = queue.known()
    queue.begin(first)
    queue.finish(first, outcome())
    queue.begin(second)
    queue.fail(second, "it diverges")
    stranger = tmp_path / "C" / "seed-1"
    stranger.mkdir(parents=True)
    (stranger / "metrics.csv").write_text("round,wall_s\n")
    fit = tmp_path / "20260101-000000"  # flsuite fit with the same default folder
    fit.mkdir()
    (fit / "metrics.csv").write_text("round,wall_s\n")
    print_status(queue)
    text = words(capsys)
    assert "0.4000" in text and "test accuracy, in the round picked on validation data" in text
    assert "1 of 4 cells are done, 1 failed, 2 waiting" in text and "about 0:00:0" in text
    assert f"failed: {second.name} seed {second.seed}: it diverges" in text
    assert "2 runs in the folder do not belong" in text and "to leave them out" in text
    print_cells(queue)
    assert "done" in (text := words(capsys)) and "failed" in text and "results, with" not in text


def test_the_state_of_a_tuned_sweep_is_printed(tmp_path: Path, capsys: Capture) -> None:
    queue = Queue(TUNED, tmp_path)
    print_cells(queue)
    assert "4 results, with values that the tuning chooses waiting" in words(capsys)
    print_status(queue)
    assert "B alpha=0.1 waiting waiting" in words(capsys)
    for cell in queue.searches[1].cells:
        queue.begin(cell)
        queue.fail(cell, "it diverges")
    print_status(queue)
    text = words(capsys)
    assert "B alpha=0.1 failed failed" in text and "B alpha=1.0 waiting waiting" in text
    assert "failed: trial of" in text and "none of its trials has a score" in text


# Tuning


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "tuning.csv").open() as file:
        return list(csv.DictReader(file))


def finish_trials(queue: Queue, scores: dict[float, float], lower: bool = False) -> None:
    """Finish every trial, with a score that depends on the value that it has drawn."""
    for search in queue.searches:
        for cell in search.cells:
            queue.begin(cell)
            noise = 0.01 if cell.seed == 9 else -0.01
            queue.finish(cell, outcome(scores[cell.overrides["trainer.mu"]] + noise, lower))


def test_the_best_trial_goes_into_the_results(tmp_path: Path) -> None:
    queue = Queue(TUNED, tmp_path)
    assert queue.size == 2 * 2 * 2 + 8  # two trials on two seeds of B at two points, and results
    assert {cell.method for cell in queue.known() if not cell.is_trial} == {"A"}
    drawn = [trial.values["trainer.mu"] for trial in queue.searches[1].trials]
    finish_trials(queue, {mu: 0.5 + 0.1 * (mu == drawn[1]) for mu in (0.0, 0.5, 1.0)})
    results = [cell for cell in queue.known() if cell.method == "B" and not cell.is_trial]
    assert len(results) == 4
    assert {cell.overrides["trainer.mu"] for cell in results} == {drawn[1]}
    assert {cell.seed for cell in results} == {1, 2}

    table = rows(tmp_path)
    assert tuple(table[0]) == TUNING_COLUMNS
    assert [(r["method"], r["grid point"], r["trial"], r["chosen"]) for r in table] == [
        ("B", f"alpha={alpha}", str(trial), str(trial == 2))
        for alpha in (0.1, 1.0)
        for trial in (1, 2)
    ]
    assert [json.loads(row["values"]) for row in table[:2]] == [{"trainer.mu": mu} for mu in drawn]
    assert [float(row["score"]) for row in table[:2]] == pytest.approx([0.5, 0.6])


def test_a_loss_is_best_when_it_is_low(tmp_path: Path) -> None:
    queue = Queue(TUNED, tmp_path)
    drawn = [trial.values["trainer.mu"] for trial in queue.searches[1].trials]
    finish_trials(queue, {mu: 0.5 + 0.1 * (mu == drawn[1]) for mu in (0.0, 0.5, 1.0)}, lower=True)
    chosen = [row["chosen"] for row in rows(tmp_path)]
    assert chosen == ["True", "False"] * 2


def test_a_failed_trial_is_not_chosen_and_holds_up_nothing(tmp_path: Path) -> None:
    queue = Queue(TUNED, tmp_path)
    first, second = queue.searches[1].trials
    for cell in queue.searches[1].cells:
        queue.begin(cell)
        if cell is first.cells[0]:
            queue.fail(cell, "it diverges")
        else:
            assert queue.results(queue.searches[1]) is None
            queue.finish(cell, outcome(0.1 if cell in second.cells else 0.9))
    results = queue.results(queue.searches[1])
    assert results and results[0].overrides["trainer.mu"] == second.values["trainer.mu"]
    assert [row["score"] for row in rows(tmp_path)] == ["", "0.1", "", ""]


def test_a_method_without_a_score_has_no_results(tmp_path: Path) -> None:
    queue = Queue(TUNED, tmp_path)
    for cell in queue.searches[1].cells:
        queue.begin(cell)
        queue.fail(cell, "it diverges")
    assert len(run_all(queue)) == 2 * 2 + 4 + 2  # the other point's trials, and the results
    assert queue.is_over_for_now() and not queue.is_complete()
    assert queue.counts()["failed"] == 4 + 2
    assert any("none of its trials has a score" in line for line in failures(queue))


def test_more_trials_begin_with_the_same_draws() -> None:
    choices: dict[str, list[object]] = {"a": [1, 2, 3], "b": [1, 2, 3]}
    few, more = draw(choices, 3, 0, "A"), draw(choices, 7, 0, "A")
    assert more[:3] == few and len({tuple(d.values()) for d in more}) == 7
    assert draw(choices, 7, 1, "A") != more != draw(choices, 7, 0, "B")


def test_all_combinations_are_tried_if_there_are_no_more_than_trials() -> None:
    drawn = draw({"a": [1, 2], "b": [3, 4]}, 8, 0, "A")
    assert sorted(tuple(d.values()) for d in drawn) == [(1, 3), (1, 4), (2, 3), (2, 4)]


def test_trials_are_the_same_at_every_grid_point(tmp_path: Path) -> None:
    _, b, _, other_b = Queue(TUNED, tmp_path).searches
    assert [t.values for t in b.trials] == [t.values for t in other_b.trials]
    assert not set(b.cells) & set(other_b.cells)
