"""Paired comparisons, against numbers that are published or worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from flsuite.analysis import compare, load
from flsuite.analysis.comparison import comparison_note, holm, pair_cells, paired
from flsuite.commands.report import report
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import SWEEP
from tests.analysis.made_runs import Row, made_run, settings
from tests.commands.command import Capture

# Student 1908, The Probable Error of a Mean, section IX: hours of sleep gained by ten patients with
# two drugs. R's documentation of the data set "sleep" has the same numbers, and t.test(paired) of
# them gives t = -4.0621, df = 9, p = 0.002833 and the interval -2.4598858 to -0.7001142.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def write(root: Path, method: str, last: dict[int, float], alpha: float = 0.3) -> None:
    """Write runs whose last test accuracy is known by seed; round 1 is best on validation."""
    for seed, value in last.items():
        rows: list[Row] = [
            ("global", "test", "accuracy", [value / 2, value]),
            ("global", "val", "accuracy", [0.9, 0.8]),
        ]
        made_run(root / f"{method}-{alpha}" / str(seed), settings(method, seed, alpha), rows)


def test_students_sleep_data() -> None:
    difference, low, high, p = paired(np.array(DRUG_1), np.array(DRUG_2))
    assert difference == pytest.approx(-1.58)
    assert (low, high) == pytest.approx((-2.4598858, -0.7001142), abs=1e-7)
    assert p == pytest.approx(0.002833, abs=5e-7)


def test_holm_by_hand() -> None:
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, and 0.04 x 1, which is raised to the one before it.
    adjusted = holm(np.array([0.01, 0.04, 0.03, np.nan, 0.005]))
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, np.nan, 0.02], nan_ok=True)
    assert holm(np.array([0.6, 0.7])).tolist() == [1.0, 1.0]
    assert len(holm(np.array([]))) == 0


def test_seeds_are_paired_by_number_and_not_by_order(tmp_path: Path) -> None:
    seeds = range(1, 11)
    write(tmp_path, "FedAvg", dict(zip(reversed(seeds), reversed(DRUG_1), strict=True)))
    write(tmp_path, "FedProx", {**dict(zip(seeds, DRUG_2, strict=True)), 99: 1000.0})
    (row,) = compare(load(tmp_path), score="last").to_dict("records")
    assert (row["method"], row["other"], row["seeds"]) == ("FedAvg", "FedProx", 10)
    assert row["p"] == row["p_holm"] == pytest.approx(0.002833, abs=5e-7)
    assert row["difference"] == pytest.approx(-1.58)
    (picked,) = compare(load(tmp_path), score="picked").to_dict("records")
    assert picked["difference"] == pytest.approx(-1.58 / 2), "round 1 is best on validation"


def test_methods_meet_within_a_partition_and_holm_counts_all_pairs(tmp_path: Path) -> None:
    for alpha in (0.05, 0.3):
        for n, method in enumerate(("FedAvg", "FedProx", "SCAFFOLD")):
            if (alpha, method) != (0.05, "SCAFFOLD"):
                noise = np.random.default_rng(n).normal(0, 0.01, 3)
                scores = {seed: 0.5 + alpha + 0.02 * n + noise[seed] for seed in range(3)}
                write(tmp_path, method, scores, alpha)
    table = compare(load(tmp_path))
    assert list(zip(table["partition"], table["method"], table["other"], strict=True)) == [
        ("Dirichlet(alpha=0.05)", "FedAvg", "FedProx"),
        ("Dirichlet(alpha=0.3)", "FedAvg", "FedProx"),
        ("Dirichlet(alpha=0.3)", "FedAvg", "SCAFFOLD"),
        ("Dirichlet(alpha=0.3)", "FedProx", "SCAFFOLD"),
    ]
    assert table["p_holm"].to_numpy() == pytest.approx(holm(table["p"].to_numpy()))
    assert table["p_holm"].min() == pytest.approx(4 * table["p"].min())

    against = compare(load(tmp_path), against="FedAvg")
    assert set(against["other"]) == {"FedAvg"} and len(against) == 3
    with pytest.raises(FlsuiteError, match="no method 'FedSGD'; there are FedAvg"):
        compare(load(tmp_path), against="FedSGD")


def test_one_common_seed_has_a_difference_and_no_test(tmp_path: Path) -> None:
    write(tmp_path, "FedAvg", {1: 0.5, 2: 0.6})
    write(tmp_path, "FedProx", {2: 0.8, 3: 0.9})
    table = compare(load(tmp_path), score="last")
    assert table["difference"].tolist() == pytest.approx([-0.2])
    assert table[["low", "high", "p", "p_holm"]].isna().all().all()
    assert "need two common seeds" in comparison_note(table, "accuracy", "last")


@pytest.mark.parametrize("ahead", [0.0, 0.01])
def test_equal_differences_have_no_p_value(tmp_path: Path, ahead: float) -> None:
    """Their spread is that of rounding, and a p-value would be next to zero."""
    write(tmp_path, "FedAvg", {1: 0.41, 2: 0.39})
    write(tmp_path, "FedProx", {1: 0.41 - ahead, 2: 0.39 - ahead})
    (row,) = compare(load(tmp_path), score="last").to_dict("records")
    assert row["difference"] == pytest.approx(ahead, abs=1e-12)
    assert np.isnan([row["low"], row["high"], row["p"], row["p_holm"]]).all()


def test_methods_that_end_alike_are_said_to(tmp_path: Path, capsys: Capture) -> None:
    for method in ("FedAvg", "FedProx"):
        write(tmp_path, method, {1: 0.41, 2: 0.39})
    (cells,) = pair_cells(compare(load(tmp_path)))
    assert cells[2:] == ("+0.0000", "same in all seeds", "-", "-")
    report([str(tmp_path)])
    assert "same in all seeds" in capsys.readouterr().out


def test_while_a_sweep_adds_seeds_there_is_no_t_test(tmp_path: Path, capsys: Capture) -> None:
    for n, method in enumerate(("FedAvg", "FedProx")):
        write(tmp_path, method, {seed: 0.5 + n * 0.01 * seed for seed in (1, 2, 3)})
    until = {"seeds": 20, "alpha": 0.05, "width": None, "pairs": []}
    (tmp_path / SWEEP).write_text(json.dumps({"methods": ["FedAvg", "FedProx"], "until": until}))
    table = compare(load(tmp_path))
    assert table[["low", "high", "p", "p_holm"]].isna().all().all() and not table["differs"].any()
    report([str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert "seeds are being added, up to 20, until each" in out and "same in all seeds" not in out


def test_the_default_score_is_that_of_a_report(tmp_path: Path, capsys: Capture) -> None:
    """It is the round that the runs' own monitor picks, where all runs have one."""
    for method, first, last in (("FedAvg", 0.5, 0.6), ("FedProx", 0.8, 0.7)):
        rows: list[Row] = [
            ("global", "test", "accuracy", [first, last]),
            ("global", "val", "accuracy", [0.1, 0.9]),
            ("global", "val", "loss", [1.0, 2.0]),
        ]
        for seed in (1, 2):
            made = settings(method, seed, monitor="loss")
            made_run(tmp_path / "a" / method / str(seed), made, rows)
    report([str(tmp_path)])
    assert "-0.3000" in capsys.readouterr().out
    assert compare(load(tmp_path))["difference"].tolist() == pytest.approx([-0.3])

    no_choice: list[Row] = [("global", "test", "accuracy", [0.8, 0.7])]
    made_run(tmp_path / "FedProx-3", settings("FedProx", 3, monitor="loss"), no_choice)
    report([str(tmp_path)])
    assert "-0.1000" in capsys.readouterr().out
    assert compare(load(tmp_path))["difference"].tolist() == pytest.approx([-0.1])


def test_no_validation_scores_is_said(tmp_path: Path) -> None:
    made_run(tmp_path / "a", settings("FedAvg", 1), [("global", "test", "accuracy", [0.5])])
    with pytest.raises(FlsuiteError, match="no run has validation scores of 'accuracy'"):
        compare(load(tmp_path), score="picked")


def test_the_note_says_what_five_seeds_cannot_show(tmp_path: Path) -> None:
    from scipy.stats import wilcoxon

    for n, method in enumerate(("FedAvg", "FedProx")):
        write(tmp_path, method, {seed: 0.5 + n * 0.01 * seed for seed in range(5)})
    note = comparison_note(compare(load(tmp_path)), "accuracy", "last")
    assert (
        "With 5 seeds" in note and "cannot go below p = 0.0625" in note and "over 1 pair." in note
    )
    differences = np.arange(1.0, 6.0)  # all of one sign
    assert wilcoxon(differences, method="exact").pvalue == pytest.approx(0.0625)
