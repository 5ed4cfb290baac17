"""Ranks across data sets against numbers worked out by hand and the tables of Demšar 2006."""

from pathlib import Path

import pandas as pd
import pytest

from flsuite.analysis import load, ranks, ranks_figure
from flsuite.common.errors import FlsuiteError
from tests.analysis.made_runs import made_run, settings
from tests.commands.command import Capture, cli

METHODS = ("FedAvg", "FedProx", "FedDyn", "MOON")


def written(folder: Path, scores: list[tuple[float, ...]], metric: str = "accuracy") -> Path:
    """Write a run per data set (row) and method (column)."""
    for number, row in enumerate(scores, start=1):
        for method, score in zip(METHODS, row, strict=False):
            content = settings(method, 1, float(number), monitor=metric)
            rows = [("global", "test", metric, [score])]
            made_run(folder / f"{number}-{method}", content, rows)
    return folder


def test_ranks_by_hand(tmp_path: Path) -> None:
    """The statistic is 12 N / (k (k + 1)) (sum of squared mean ranks - k (k + 1)² / 4)."""
    scores = [(0.9, 0.8, 0.7), (0.9, 0.8, 0.8), (0.6, 0.8, 0.5), (0.9, 0.8, 0.7)]
    result = ranks(load(written(tmp_path, scores)))
    table = result.table.set_index("method")
    assert table["rank"].to_dict() == {"FedAvg": 1.25, "FedProx": 1.875, "FedDyn": 2.875}
    assert table.loc["FedDyn"].tolist()[1:] == [3.0, 2.5, 3.0, 3.0], "half of a tie each"
    # 12 · 4 / 12 · (1.25² + 1.875² + 2.875² - 12) = 5.375, divided by 1 - 6 / (4 · 24) for the tie;
    # chi² of two degrees of freedom exceeds x with probability exp(-x / 2).
    assert result.p == pytest.approx(2.718281828 ** (-5.375 / (1 - 6 / 96) / 2), rel=1e-6)


def test_a_loss_is_best_when_low_and_methods_that_are_alike_do_not_differ(tmp_path: Path) -> None:
    results = load(written(tmp_path / "a", [(0.1, 0.2, 0.3)] * 3, "loss"))
    assert ranks(results, "loss").table["method"].tolist() == ["FedAvg", "FedProx", "FedDyn"]
    assert ranks(load(written(tmp_path / "b", [(0.5, 0.5, 0.5)] * 3))).p == 1.0


def test_the_critical_difference_is_that_of_the_paper(tmp_path: Path) -> None:
    """Section 3.2.4: four classifiers on 14 data sets have 1.25 at 5 %."""
    scores = [(0.9, 0.8, 0.7, 0.6)] * 14
    results = load(written(tmp_path, scores))
    assert ranks(results).critical == pytest.approx(1.25, abs=0.005)
    panel = ranks_figure(results).axes[0]
    bars = [line.get_xdata() for line in panel.lines if line.get_linewidth() == 3.5]
    assert [(round(a + 0.03), round(b - 0.03)) for a, b in bars] == [(1, 2), (2, 3), (3, 4)]
    assert {text.get_text() for text in panel.texts} >= {"FedAvg (1.00)", "MOON (4.00)"}


def test_two_methods_have_no_ranks(tmp_path: Path) -> None:
    with pytest.raises(FlsuiteError, match="2 methods share scores on 3 partitions"):
        ranks(load(written(tmp_path, [(0.9, 0.8)] * 3)))


def test_the_command_writes_them(tmp_path: Path, capsys: Capture) -> None:
    runs = written(tmp_path / "runs", [(0.9, 0.8, 0.7)] * 3)
    assert cli("report", str(runs), "--output", str(tmp_path / "out")) == 0
    line = "FedAvg 1.00, FedProx 2.00, FedDyn 3.00. Friedman's test has p = 0.0498."
    assert line in " ".join(capsys.readouterr().out.split())
    assert line in (tmp_path / "out" / "report.md").read_text()
    assert pd.read_csv(tmp_path / "out" / "ranks.csv")["rank"].tolist() == [1.0, 2.0, 3.0]
    assert {path.name for path in (tmp_path / "out").glob("ranks-*")} == {
        "ranks-accuracy.png",
        "ranks-accuracy.pdf",
    }
