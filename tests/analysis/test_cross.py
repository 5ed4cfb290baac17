"""Cross tables against numbers worked out by hand."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flsuite.analysis import cross_markdown, cross_matrices, cross_table, find_runs, group_runs
from flsuite.commands.main import main
from flsuite.common.errors import FlsuiteError
from tests.analysis.made_runs import Row, made_run, settings
from tests.commands.command import Capture


def attack(name: str, fraction: float, **others: float) -> dict[str, Any]:
    arguments = {"fraction": fraction, **others}
    return {"class_path": f"flsuite.aggregators.attacks.{name}", "init_args": arguments}


def write(
    folder: Path, content: dict[str, Any], test: float, backdoor: float | None = None
) -> None:
    """Write a run of two rounds. Validation picks the first."""
    rows: list[Row] = [
        ("global", "val", "accuracy", [0.9, 0.8]),
        ("global", "test", "accuracy", [test - 0.1, test]),
    ]
    if backdoor is not None:
        rows.append(("global", "test", "backdoor_success", [0.0, backdoor]))
    made_run(folder, content, rows)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two rules against no attack and two attacks with two fractions each, two seeds."""
    root = tmp_path_factory.mktemp("runs")
    for i, rule in enumerate(("Krum", "FedAvg")):
        for seed in (1, 2):
            base = 0.3 * i + 0.02 * seed
            write(root / f"{rule}-{seed}", settings(rule, seed), 0.5 + base)
            for j, (name, extra) in enumerate(
                (("SignFlip", {"scale": 5.0}), ("PixelBackdoor", {}))
            ):
                for fraction in (0.1, 0.25):
                    content = settings(rule, seed, attack=attack(name, fraction, **extra))
                    folder = root / f"{rule}-{seed}-{name}-{fraction}"
                    write(folder, content, base + fraction + 0.1 * j, 0.5 if j else None)
    return root


def table_of(root: Path, **arguments: Any) -> pd.DataFrame:
    return cross_table(group_runs(find_runs([root])), **arguments)


def test_means_of_a_panel_for_each_fraction_with_the_honest_runs_in_both(runs: Path) -> None:
    table = table_of(runs, rows="aggregator", columns="trainer.attack")
    matrices = cross_matrices(table, "accuracy")

    assert list(matrices) == ["fraction=0.1", "fraction=0.25"]
    low, high = matrices.values()
    assert list(low.index) == ["FedAvg", "Krum"]
    assert list(low.columns) == ["none", "PixelBackdoor", "SignFlip"]
    assert low.loc["FedAvg"].tolist() == pytest.approx([0.83, 0.53, 0.43])
    assert low.loc["Krum"].tolist() == pytest.approx([0.53, 0.23, 0.13])
    assert high.loc["Krum"].tolist() == pytest.approx([0.53, 0.38, 0.28])
    picked = cross_matrices(table, "accuracy", "picked")["fraction=0.25"]
    assert picked.loc["Krum"].tolist() == pytest.approx([0.43, 0.28, 0.18])
    assert set(table["runs"]) == {2}
    assert table["last_std"].tolist() == pytest.approx([0.02 / 2**0.5] * len(table))


def test_a_setting_that_is_left_open_is_a_panel_of_its_own(tmp_path: Path) -> None:
    for decay in (None, 0.9):
        content = settings("FedAvg", 1, attack=attack("SignFlip", 0.1), lr_decay=decay)
        write(tmp_path / str(decay), content, 0.5)

    table = table_of(tmp_path, rows="aggregator", columns="attack")
    assert list(cross_matrices(table, "accuracy")) == ["lr_decay=None", "lr_decay=0.9"]


def test_markdown_has_means_with_spreads_and_empty_cells(runs: Path) -> None:
    table = table_of(
        runs, rows="aggregator", columns="attack", metrics=["accuracy", "backdoor_success"]
    )
    text = cross_markdown(table)

    assert "### test accuracy, last round, fraction=0.1\n" in text
    assert "### test backdoor_success, picked on validation, fraction=0.25\n" in text
    assert "|  | none | PixelBackdoor | SignFlip |\n|---|---|---|---|\n" in text
    assert "| FedAvg | 0.830 ± 0.014 | 0.530 ± 0.014 | 0.430 ± 0.014 |" in text
    assert "|  | PixelBackdoor |\n|---|---|\n| FedAvg | 0.500 ± 0.000 |" in text


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ("aggregator", "aggregator", "rows and columns are both 'aggregator'; name two settings"),
        ("aggregator", "atack", "no run has the setting 'atack'; the runs differ in aggregator"),
    ],
)
def test_wrong_settings_are_refused(runs: Path, rows: str, columns: str, message: str) -> None:
    with pytest.raises(FlsuiteError, match=message):
        table_of(runs, rows=rows, columns=columns)


def test_a_score_that_no_run_has_is_refused(runs: Path) -> None:
    with pytest.raises(FlsuiteError, match="no run has the test score 'f2'"):
        table_of(runs, rows="aggregator", columns="attack", metrics=["f2"])


@pytest.mark.draws
def test_the_command_prints_and_writes_the_tables(
    runs: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    wanted = ["--rows", "aggregator", "--columns", "attack", "--output", str(out)]
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(runs), *wanted])

    printed = capsys.readouterr().out
    assert "test accuracy, fraction=0.25" in printed
    assert "runs per cell: 2" in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "cross-accuracy.pdf",
        "cross-accuracy.png",
        "cross.csv",
        "cross.md",
    ]
    assert len(pd.read_csv(out / "cross.csv")) == 12


def test_the_command_wants_both_settings(runs: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(runs), "--rows", "aggregator"])
    assert "--rows and --columns go together" in capsys.readouterr().err


def test_forks_are_in_one_table_with_the_runs_that_they_begin_in(tmp_path: Path) -> None:
    """The hash of the parent follows from the rule, so it makes no table of its own."""
    for number, rule in enumerate(("Krum", "FedAvg")):
        for name, of_attack, fork in (
            ("parent", None, None),
            ("fork", attack("SignFlip", 0.2), {"round": 1, "parent": f"hash{number}"}),
        ):
            content = {**settings(rule, 1), "attack": of_attack, "fork": fork}
            write(tmp_path / f"{rule}-{name}", content, 0.5 + 0.1 * number)
    table = cross_table(group_runs(find_runs([tmp_path])), "aggregator", "attack", ["accuracy"])
    (matrix,) = cross_matrices(table, "accuracy", "last").values()
    assert matrix.shape == (2, 2) and matrix.notna().all().all()
