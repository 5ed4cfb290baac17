"""A run's own scores lead its figure and its report, whatever they are called."""

from pathlib import Path
from typing import Any

import pytest

from flsuite.analysis import run_figure
from flsuite.analysis.groups import find_runs, group_runs
from flsuite.analysis.report import default_metrics
from flsuite.commands.main import run_command
from flsuite.common.errors import FlsuiteError
from flsuite.common.score_names import main_scores
from tests.analysis.made_runs import Row, made_run, settings
from tests.commands.command import Capture

REGRESSION: list[Row] = [
    ("global", "val", "r2", [0.5, 0.9, 0.7]),
    ("global", "val", "mae", [3.0, 2.0, 1.0]),
    ("global", "test", "r2", [0.1, 0.2, 0.3]),
    ("global", "test", "mae", [3.5, 2.5, 1.5]),
    ("global", "test", "mae_client_std", [0.5, 0.5, 0.5]),
    ("0", "test", "mae", [9.0, 9.0, 9.0]),
    ("global", "train", "loss", [1.0, 1.0, 1.0]),
]


def regression(folder: Path, seed: int = 1, **others: Any) -> Path:
    content = settings("FedAvg", seed, **{"monitor": "r2", **others})
    return made_run(folder, content, REGRESSION)


@pytest.mark.parametrize(
    ("names", "monitor", "expected"),
    [
        (["loss", "auroc", "accuracy"], "accuracy", ["accuracy", "loss", "auroc"]),
        (["accuracy", "accuracy/3", "all_clients/accuracy"], "accuracy", ["accuracy"]),
        (
            ["task_accuracy", "task_accuracy/0", "pixels_worst"],
            "x",
            ["task_accuracy", "pixels_worst"],
        ),
        (
            ["accuracy", "accuracy_client_mean", "accuracy_std", "loss"],
            "accuracy_client_mean",
            ["accuracy_client_mean", "loss", "accuracy"],
        ),
    ],
)
def test_main_scores_are_no_details_of_others(
    names: list[str], monitor: str, expected: list[str]
) -> None:
    assert main_scores(names, monitor) == expected


@pytest.mark.parametrize(
    ("x", "points", "last_tick"), [("round", [1, 2, 3], 3), ("virtual_s", [2, 4, 6], None)]
)
def test_a_panel_for_each_score_with_the_picked_round(
    x: str, points: list[float], last_tick: int | None, tmp_path: Path
) -> None:
    figure = run_figure(regression(tmp_path / "run"), x)
    figure.canvas.draw()
    panels = figure.axes
    assert [panel.get_ylabel() for panel in panels] == ["r2", "mae"]
    for panel, test, val in ((panels[0], 2, 0), (panels[1], 3, 1)):
        assert list(panel.lines[0].get_xdata()) == points
        assert list(panel.lines[0].get_ydata()) == REGRESSION[test][3]
        assert list(panel.lines[1].get_ydata()) == REGRESSION[val][3]
        # Round 2 has the best r2 on validation data, and not the best of either on test data.
        assert panel.lines[2].get_xdata()[0] == points[1]
        assert panel.lines[3].get_xydata().tolist() == [[points[1], REGRESSION[test][3][1]]]
        assert panel.get_xlabel() == {"round": "round", "virtual_s": "virtual seconds"}[x]
        ticks = panel.get_xticks()
        assert last_tick is None or (ticks[-1] == last_tick and all(t % 1 == 0 for t in ticks))
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["test", "validation", "picked on validation (round 2)"]


@pytest.mark.parametrize("rounds", [1, 7, 23, 100, 1001])
def test_the_last_tick_is_the_last_round(rounds: int, tmp_path: Path) -> None:
    rows: list[Row] = [("global", "test", "accuracy", [0.5] * rounds)]
    figure = run_figure(made_run(tmp_path / "run", settings("FedAvg", 1), rows))
    figure.canvas.draw()
    (panel,) = figure.axes
    ticks = list(panel.get_xticks())
    assert ticks[-1] == rounds and ticks[0] >= 1 and ticks == sorted(set(ticks))
    assert len(panel.lines) == 1  # without validation data no round is picked


def test_a_run_without_scores_is_named(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", settings("FedAvg", 1), REGRESSION[5:6])
    with pytest.raises(FlsuiteError, match="has no scores yet"):
        run_figure(folder)


def test_without_scores_the_training_loss_is_drawn(tmp_path: Path) -> None:
    figure = run_figure(made_run(tmp_path / "run", settings("FedAvg", 1), REGRESSION[-1:]))
    ((line,),) = [panel.lines for panel in figure.axes]
    assert line.get_label() == "training" and list(line.get_ydata()) == [1.0, 1.0, 1.0]


def test_a_report_of_one_experiment_has_the_runs_scores(tmp_path: Path, capsys: Capture) -> None:
    for seed in (1, 2):
        regression(tmp_path / str(seed), seed)
    assert run_command("report", [str(tmp_path)]) == 0
    cells = [line.split("│")[:3] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in cells[-2:]] == [
        ["r2", "2", "0.300±0.000"],
        ["mae", "2", "1.500±0.000"],
    ]


def test_a_comparison_is_by_the_score_that_picks_a_round(tmp_path: Path) -> None:
    regression(tmp_path / "a")
    groups = group_runs(find_runs([tmp_path]))
    assert default_metrics(groups, ["test", "val"], 1) == ["r2"]  # for a target
    regression(tmp_path / "b", rounds=9)
    regression(tmp_path / "c", monitor="mae")
    groups = group_runs(find_runs([tmp_path]))
    assert sorted(default_metrics(groups, ["test", "val"], 4)) == ["mae", "r2"]
    for folder in "abc":
        path = tmp_path / folder / "settings.yaml"
        path.write_text(path.read_text().replace("monitor: r2", "monitor: gone"))
        path.write_text(path.read_text().replace("monitor: mae", "monitor: gone"))
    assert default_metrics(group_runs(find_runs([tmp_path])), ["test"], 4) == ["r2"]
