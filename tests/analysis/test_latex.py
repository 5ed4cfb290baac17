"""What a report writes for a paper: the table against numbers worked out by hand, and figures."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from flsuite.analysis import compare, curves_figure, latex_table, load, report_table
from flsuite.analysis.comparison import comparison_note
from flsuite.analysis.sequential import Decision, _Look
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import SWEEP
from tests.analysis.made_runs import made_run, settings
from tests.commands.command import Capture, cli

SCORES = {"Prox_1": (0.50, 0.52, 0.54), "FedAvg": (0.60, 0.63, 0.66), "Adam": (0.1, 0.9, 0.2)}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write a sweep of three methods, whose file names them in another order than the alphabet."""
    for number, (method, scores) in enumerate(SCORES.items()):
        for seed, score in enumerate(scores, start=1):
            content = settings("FedAvg", seed, epochs=number)
            folder = tmp_path / f"{method}-0000000{number}" / f"seed-{seed}"
            made_run(folder, content, [("global", "test", "accuracy", [0.0, score])])
    (tmp_path / SWEEP).write_text(json.dumps({"methods": [*SCORES]}))
    return tmp_path


def cells(tex: str) -> dict[str, list[str]]:
    """Return the cells of a table by the first one of their row."""
    body = tex.split(r"\midrule")[1].split(r"\bottomrule")[0]
    rows = [line.removesuffix(r"\\").split(" & ") for line in body.strip().splitlines()]
    return {first: [cell.strip() for cell in rest] for first, *rest in rows}


def test_the_table_by_hand(sweep: Path) -> None:
    tex = latex_table(load(sweep))
    assert cells(tex) == {
        r"Prox\_1": [r"$0.520 \pm 0.020$"],
        "FedAvg": [r"$\mathbf{0.630} \pm 0.030$\rlap{$^{*}$}"],
        "Adam": [r"$0.400 \pm 0.436$"],
    }, "in the order of the file; FedAvg is 0.10, 0.11 and 0.12 better than the first"
    assert list(cells(latex_table(load(sweep), against="Adam"))) == ["Adam", r"Prox\_1", "FedAvg"]
    with pytest.raises(FlsuiteError, match="no method 'Fed'"):
        latex_table(load(sweep), against="Fed")


def test_a_method_without_a_score_of_some_seed_has_no_mean(sweep: Path) -> None:
    content = settings("FedAvg", 3, epochs=1)
    folder = sweep / "FedAvg-00000001" / "seed-3"
    rmtree(folder)
    made_run(folder, content, [("global", "test", "accuracy", [0.0, math.nan])])
    assert cells(latex_table(load(sweep))) == {
        r"Prox\_1": [r"$\mathbf{0.520} \pm 0.020$"],
        "FedAvg": ["--"],
        "Adam": [r"$0.400 \pm 0.436$"],
    }


def test_a_star_is_what_a_sweep_has_decided(sweep: Path) -> None:
    """The t-test marks FedAvg, but is not corrected for looking at it after every seed."""
    open_, differs = (_Look(3, 0.1, 0.1, 0.1, because) for because in ("seeds", "zero"))
    pairs = [
        Decision("accuracy", "FedAvg", "Prox_1", "", "FedAvg-00000001", open_),
        Decision("accuracy", "Adam", "Prox_1", "", "Adam-00000002", differs),
    ]
    until = {"seeds": 3, "alpha": 0.05, "width": None, "pairs": [*map(asdict, pairs)]}
    (sweep / SWEEP).write_text(json.dumps({"methods": [*SCORES], "until": until}))
    tex = latex_table(load(sweep))
    marked = {method for method, own in cells(tex).items() if "*" in own[0]}
    assert marked == {"Adam"} and "alpha spending" in tex and "Holm" not in tex
    assert "*" not in cells(latex_table(load(sweep), against="FedAvg"))["Adam"][0]

    table = compare(load(sweep)).set_index(["method", "other"])
    assert table["p_holm"].isna().all(), "as in the terminal"
    assert table[table["differs"]].index.tolist() == [("Prox_1", "Adam")]
    assert table.loc[("Prox_1", "Adam"), ["low", "high"]].tolist() == [-0.1, -0.1]


def test_a_table_claims_only_the_tests_that_were_made(sweep: Path) -> None:
    others = sweep / "others"
    others.mkdir()
    for method in ("FedAvg-00000001", "Adam-00000002"):
        (sweep / method).rename(others / method)
    assert not re.search(r"Bold|differs|bf|\*", latex_table(load(sweep / "Prox_1-00000000")))
    for seed in (2, 3):
        rmtree(sweep / "Prox_1-00000000" / f"seed-{seed}")
    made = latex_table(load(sweep), against="FedAvg")
    assert "differs from FedAvg" in made and "dagger}$: not tested against FedAvg, for lack" in made
    assert cells(made)[r"Prox\_1"] == [r"$0.500$\rlap{$^{\dagger}$}"]
    assert "over 1 to 3 seeds" in made
    one_seed = latex_table(load(sweep / "Prox_1-00000000", others / "Adam-00000002" / "seed-1"))
    assert "one seed. Bold: the best mean.}" in one_seed


def test_other_scores_of_a_sweep_that_added_seeds_are_not_tested(sweep: Path) -> None:
    pair = Decision("loss", "FedAvg", "Prox_1", "", "FedAvg-00000001", _Look(3, 1, 1, 1, "zero"))
    until = {"seeds": 3, "alpha": 0.05, "width": None, "pairs": [asdict(pair)]}
    (sweep / SWEEP).write_text(json.dumps({"methods": [*SCORES], "until": until}))
    made = latex_table(load(sweep))
    assert not re.search(r"differs|dagger|\*|Pocock", made)
    table = compare(load(sweep))
    assert table["p"].isna().all() and not table["differs"].any()
    assert "Other pairs are not tested" in comparison_note(table, "accuracy", "last")


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_huge_losses_are_in_scientific_form(tmp_path: Path, capsys: Capture) -> None:
    losses = {"A": (1e300, 3e300), "B": (math.inf, 1.0), "C": (2.5e6, 2.5e6), "D": (0.1, 0.2)}
    for number, (method, own) in enumerate(losses.items()):
        for seed, loss in enumerate(own):
            folder = tmp_path / f"{method}-0000000{number}" / f"seed-{seed}"
            content = settings("FedAvg", seed, epochs=number)
            made_run(folder, content, [("global", "test", "loss", [loss])])
    tex = cells(latex_table(load(tmp_path), ["loss"], against="D"))
    assert tex["A"] == [r"$2.000 \times 10^{300}$\rlap{$^{\dagger}$}"]
    assert tex["B"] == [r"$\infty$\rlap{$^{\dagger}$}"]
    assert tex["C"][0].startswith(r"$2.500 \times 10^{6} \pm 0.000$")
    assert cli("report", str(tmp_path), "--metric", "loss") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 99


def test_the_table_can_be_compiled(sweep: Path) -> None:
    """Check its structure: environments and braces are closed, and rows have the columns."""
    made_run(
        sweep / "Adam-00000009" / "seed-1",
        settings("FedAvg", 1, 10.0, epochs=2),
        [("global", "test", name, [0.5]) for name in ("accuracy", "f1_macro")],
    )
    tex = latex_table(load(sweep), ["accuracy", "f1_macro"])
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", tex) for word in ("begin", "end"))
    assert begun == ["table", "tabular"] and ended == begun[::-1]
    plain = re.sub(r"\\[{}$&%#_]", "", tex)
    assert plain.count("{") == plain.count("}") and plain.count("$") % 2 == 0
    assert not re.search(r"[%#]|(?<!\^)_|±", plain.replace("$^{*}$", ""))
    (columns,) = re.findall(r"begin{tabular}{(l(c+))}", tex)
    assert columns[1] == "ccc"
    assert all(len(row) == 3 for row in cells(tex).values())
    assert cells(tex)["FedAvg"][1:] == ["--", "--"]


@pytest.mark.draws
def test_the_command_writes_the_order_of_the_file_and_fonts(sweep: Path, tmp_path: Path) -> None:
    assert cli("report", str(sweep), "--output", str(tmp_path / "out")) == 0
    text = (tmp_path / "out" / "report.pdf").read_bytes()
    assert b"/CIDFontType2" in text and b"/Type3" not in text
    assert cells((tmp_path / "out" / "report.tex").read_text()).keys() == {
        r"Prox\_1",
        "FedAvg",
        "Adam",
    }
    assert report_table(str(sweep))["group"].tolist() == [*SCORES]
    (sweep / SWEEP).write_text("{")
    with pytest.raises(FlsuiteError, match=r"sweep\.json is damaged"):
        load(sweep)


def test_lines_differ_without_color_and_bands_are_chosen(sweep: Path) -> None:
    looks, tops = set(), {}
    for band in ("range", "std", "95", "none"):
        panel = curves_figure(load(sweep), ["accuracy"], band=band).axes[0]
        looks = {(line.get_linestyle(), line.get_marker()) for line in panel.lines}
        assert len(looks) == 3
        bands = [area for area in panel.collections if to_rgba("C0", 0.15) in area.get_facecolor()]
        tops[band] = bands[0].get_paths()[0].vertices[:, 1].max() if bands else None
    # The first method's scores are 0.50, 0.52 and 0.54, and t of two degrees of freedom is 4.303.
    assert tops == {
        "range": pytest.approx(0.54),
        "std": pytest.approx(0.54),
        "95": pytest.approx(0.52 + 4.3027 * 0.02 / np.sqrt(3), abs=1e-5),
        "none": None,
    }
    with pytest.raises(FlsuiteError, match="band"):
        curves_figure(load(sweep), band="90")
