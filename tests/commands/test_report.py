"""``flsuite report``: its groups, and its numbers against those worked out by hand."""

from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from flsuite.aggregators import FedAvg
from flsuite.analysis import (
    curves_figure,
    find_runs,
    group_runs,
    load,
    report_markdown,
    report_table,
    target_table,
)
from flsuite.analysis.curves import seed_curves
from flsuite.analysis.listing import apart, measured
from flsuite.analysis.report import target_markdown
from flsuite.analysis.results import only, results_of
from flsuite.analysis.runs import curve
from flsuite.callbacks import GradientDissimilarity, RoundEarlyStopping, RoundProgress
from flsuite.common.errors import FlsuiteError
from flsuite.data import FederatedDataModule, TaskSequence
from flsuite.federation import InProcess
from flsuite.runs.table import MetricsTable
from tests.commands.command import QUICKSTART, Capture, cli, refused
from tests.conftest import classifier, digits, trainer


def settings(
    seed: int, aggregator: str = "FedAvg", lr: float = 0.1, **others: object
) -> dict[str, Any]:
    """Return the settings of a run, in the form in which a run writes them."""
    return {
        "rounds": 3,
        "seed": seed,
        "monitor": "accuracy",
        "model": {"class_path": "flsuite.models.Classifier", "init_args": {"lr": lr}},
        "data": {"class_path": "flsuite.data.Digits", "init_args": {"clients": 2}},
        "client": {"max_epochs": 1},
        "aggregator": {"class_path": f"flsuite.aggregators.{aggregator}", "init_args": {}},
        "schedule": {"class_path": "flsuite.federation.Synchronous", "init_args": {}},
        "callbacks": [],
        "stopping": [],
        **others,
    }


def write(
    folder: Path,
    content: dict[str, Any],
    test: Sequence[float],
    val: Sequence[float] = (),
    times: Sequence[float] = (0.0,) * 9,
    metric: str = "accuracy",
) -> None:
    """Write what a report reads of a run whose rounds end at these virtual seconds."""
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(content))
    rows = [
        (n, times[n - 1], times[n - 1] + 100, 5 * n, 10**6 * n, "global", split, metric, score)
        for split, scores in {"test": test, "val": val}.items()
        for n, score in enumerate(scores, start=1)
    ]
    table = pd.DataFrame(rows, columns=list(MetricsTable.columns))
    table.to_csv(folder / "metrics.csv", index=False)


def note(folder: Path, metric: str, **splits: Sequence[float]) -> None:
    """Add the rows of a metric, round by round."""
    with (folder / "metrics.csv").open("a") as file:
        for split, scores in splits.items():
            for n, value in enumerate(scores, start=1):
                file.write(f"{n},0,0,0,0,global,{split},{metric},{value}\n")


def ran(capsys: Capture, *args: str) -> str:
    """Return what the command prints."""
    capsys.readouterr()
    assert cli("report", *args) == 0
    return capsys.readouterr().out


def words(capsys: Capture, *args: str) -> str:
    """Return what the command prints, on one line."""
    return " ".join(ran(capsys, *args).split())


def labels(folder: Path) -> list[str]:
    return [group.label for group in group_runs(find_runs([folder]))]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write(tmp_path / "a1", settings(1), [0.1, 0.9, 0.4], [0.5, 0.2, 0.5])
    write(tmp_path / "deep" / "a2", settings(2), [0.2, 0.8, 0.6], [0.1, 0.2, 0.3])
    write(tmp_path / "b1", settings(1, "FedAdam"), [0.5, 0.5, 0.5])
    return tmp_path


def test_groups_and_figures_by_hand(runs: Path) -> None:
    groups = group_runs(find_runs([runs]))
    assert [(group.label, len(group.runs)) for group in groups] == [("FedAdam", 1), ("FedAvg", 2)]
    table = report_table(groups, last=2).set_index("group")
    average = table.loc["FedAvg"]
    assert average["last"] == pytest.approx(0.5) and average["last_std"] == pytest.approx(0.02**0.5)
    assert average["picked"] == pytest.approx((0.1 + 0.6) / 2), (
        "round 1, the earlier of equals, and round 3"
    )
    assert average["mean_last"] == pytest.approx((0.65 + 0.7) / 2)
    assert average["best_on_test"] == pytest.approx(0.85)
    assert pd.isna(table.loc["FedAdam"]["picked"]) and pd.isna(table.loc["FedAdam"]["last_std"])
    markdown = report_markdown(table.reset_index())
    assert "| FedAdam | accuracy | 1 | 0.500 |  | 0.500 | 0.500 |" in markdown
    assert (
        "| FedAvg | accuracy | 2 | 0.500 ± 0.141 | 0.350 ± 0.354 | 0.675 ± 0.035 | 0.850 ± 0.071 |"
        in markdown
    )
    assert len(curves_figure(results_of(groups), "accuracy").axes[0].lines) == 2


def test_a_parameter_tells_groups_of_one_class_apart(tmp_path: Path) -> None:
    write(tmp_path / "slow", settings(1, lr=0.01), [0.1])
    write(tmp_path / "fast", settings(1, lr=0.1), [0.1])
    assert labels(tmp_path) == ["lr=0.01", "lr=0.1"]


def test_a_parameter_of_another_class_is_not_compared(tmp_path: Path) -> None:
    other = settings(1, lr=0.5)
    other["model"] = {"class_path": "flsuite.models.ACVAE", "init_args": {"lr": 0.3, "depth": 2}}
    write(tmp_path / "one", settings(1), [0.1])
    write(tmp_path / "two", other, [0.1])
    assert labels(tmp_path) == ["ACVAE", "Classifier"]


def test_a_value_of_several_lines_is_shown_on_one(tmp_path: Path, capsys: Capture) -> None:
    for name, text in (("a", "def adam(p):\n    return p | q"), ("b", "sgd")):
        own = settings(1)
        own["model"]["init_args"]["optimizer"] = text
        write(tmp_path / name, own, [0.1])
    table = report_table(group_runs(find_runs([tmp_path])))
    first, *_, last = report_markdown(table).splitlines()
    assert len(report_markdown(table).splitlines()) == 4 and last.count(" | ") == first.count(" | ")
    assert "sgd" in ran(capsys, str(tmp_path))


def test_times_that_are_measured_within_faults_are_noted(tmp_path: Path) -> None:
    inner = {"class_path": "flsuite.federation.Synchronous", "init_args": {}}
    faults = {"class_path": "flsuite.federation.Faults", "init_args": {"schedule": inner}}
    write(tmp_path / "a", settings(1, schedule=faults), [0.1])
    (line,) = measured(group_runs(find_runs([tmp_path])), "virtual_s")
    assert "were measured on the machine" in line


def test_a_mapping_is_named_as_a_whole(tmp_path: Path) -> None:
    for name, ranges in (("a", "maxima"), ("b", {"network.0": 30.0, "": 1.0}), ("c", {"": 2.0})):
        masks = {"class_path": "flsuite.aggregators.PairwiseMasks", "init_args": {"ranges": ranges}}
        write(tmp_path / name, settings(1, secure_sum=masks), [0.1])
    assert labels(tmp_path) == [
        "ranges=maxima",
        "ranges={'': 1.0, 'network.0': 30.0}",
        "ranges={'': 2.0}",
    ]


@pytest.mark.draws
def test_the_command_prints_and_writes(runs: Path, tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "short", settings(9, "FedYogi", rounds=2), [0.3, 0.4])
    out = ran(capsys, str(runs), "--output", str(tmp_path / "out"))
    assert "0.500±0.141" in out and "ends with round 2 of 3" in " ".join(out.split())
    assert "last 2: mean" in " ".join(out.split()), "no more than all runs have"
    assert "0.850±0.071 \n" in out, "80 characters are enough for the table"
    (tmp_path / "short" / "metrics.csv").unlink()
    write(tmp_path / "shorter", settings(9, "FedYogi", rounds=1), [0.3])
    assert ": mean" not in ran(capsys, str(runs))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    reports = {f"report.{kind}" for kind in ("csv", "md", "tex", "png", "pdf")}
    assert names == {"comparison.csv", *reports}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "there is no folder nowhere"),
        ([], "required: FOLDER"),
        (["RUNS", "--metric", "f1"], "no run has the test score 'f1'; there are accuracy"),
        (["RUNS", "--last", "0"], "--last must be at least 1"),
        (["RUNS", "--x", "epoch"], "'round', 'virtual_s', 'wall_s', 'client_updates', 'bytes'"),
        (["RUNS", "--split", "train"], "'test', 'val'"),
        (["RUNS", "--target", "high"], "invalid float value: 'high'"),
        (["RUNS", "--target", "nan"], "--target must be a finite number, got nan"),
        (["RUNS/b1", "--split", "val"], "no run has val scores: give the data a val split"),
    ],
)
def test_bad_requests_are_one_line(runs: Path, args: list[str], said: str, capsys: Capture) -> None:
    request = (arg.replace("RUNS", str(runs)) for arg in args)
    assert said in refused(capsys, "report", *request)


def test_a_target_needs_a_score_that_is_known_to_be_good_when_high_or_low(runs: Path) -> None:
    note(runs / "a1", "novelty", test=[1.0], val=[1.0])
    with pytest.raises(FlsuiteError, match="'novelty' should be high or low"):
        target_table(load(runs), 0.5, "novelty")


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("roun\0")
    with pytest.raises(FlsuiteError, match=r"no run below .*metrics\.csv is damaged"):
        find_runs([tmp_path])


def test_a_folder_without_settings_is_named(runs: Path) -> None:
    (runs / "b1" / "settings.yaml").unlink()
    with pytest.raises(FlsuiteError, match=r"b1 has no settings\.yaml"):
        group_runs(find_runs([runs]))


def test_a_line_that_is_cut_is_not_read(runs: Path) -> None:
    with (runs / "a1" / "metrics.csv").open("a") as file:
        # Of 0.75: the run was killed, or writes.
        file.write("4,0.0,0.0,0,0,global,test,accuracy,0.7")
    (group,) = (g for g in group_runs(find_runs([runs])) if g.label == "FedAvg")
    scores = curve(group.runs[(runs / "a1").resolve()], "accuracy", "test")
    assert scores.tolist() == [0.1, 0.9, 0.4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("4,0.0,0.0,0,0,global,test,accuracy,0.7#5\n", r"line 8, column 'value': .* got '0.7#5'"),
        (
            "x,0.0,0.0,0,0,global,test,accuracy,0.7\n",
            r"line 8, column 'round': .* got 'x'; restore",
        ),
        (",0.0,0.0,0,0,global,test,accuracy,0.7\n", "line 8, column 'round': expected a number"),
    ],
)
def test_a_damaged_number_is_named(runs: Path, line: str, message: str) -> None:
    with (runs / "a1" / "metrics.csv").open("a") as file:
        file.write(line)
    with pytest.raises(FlsuiteError, match=message):
        group_runs(find_runs([runs]))


def test_damage_that_is_seen_later_is_named_too(runs: Path) -> None:
    with (runs / "a1" / "metrics.csv").open("a") as file:
        file.write("3,0.0,0.0,0,0,global,test,accuracy,0.7\n")
    with pytest.raises(FlsuiteError, match="two values of test accuracy in round 3: its"):
        report_table(group_runs(find_runs([runs])))
    cut = {"class_path": "flsuite.federation.Synchronous", "init_args": None}
    for damage in ({"seed": "x"}, {"seed": 10**30}, {"data": None}, {"schedule": cut}):
        (runs / "a1" / "settings.yaml").write_text(yaml.safe_dump(settings(1) | damage))
        with pytest.raises(FlsuiteError, match="does not hold the settings of a run"):
            group_runs(find_runs([runs]))


def test_a_file_that_is_no_text_is_no_run(runs: Path) -> None:
    (runs / "a1" / "metrics.csv").write_bytes(b"\xff\x00")
    assert len(find_runs([runs])) == 2


def test_small_is_good_for_losses_and_the_runs_own_monitor_picks(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(1, monitor="accuracy"), [0.1, 0.2, 0.3], [0.1, 0.9, 0.2])
    note(tmp_path / "a", "nll", test=[5.1, 1.1, 2.2], val=[5.0, 2.0, 1.0])
    note(tmp_path / "a", "novelty", test=[1.0, 2.0, 3.0], val=[1.0, 2.0, 3.0])
    table = report_table(group_runs(find_runs([tmp_path])), ["nll", "novelty"]).set_index("metric")
    assert table.loc["nll"]["best_on_test"] == 1.1 and table.loc["nll"]["picked"] == 1.1, (
        "round 2, best by accuracy"
    )
    assert pd.isna(table.loc["novelty"]["best_on_test"]), "whether it should be large is not known"
    write(tmp_path / "b", settings(1, monitor="loss"), [0.1, 0.2], [0.9, 0.1])
    note(tmp_path / "b", "loss", test=[3.0, 4.0], val=[3.0, 4.0])
    (row,) = report_table(group_runs([tmp_path / "b"])).to_dict("records")
    assert row["picked"] == 0.1


def test_a_run_that_diverged_has_no_last_score_and_no_mean(tmp_path: Path, capsys: Capture) -> None:
    """Its earlier score, or the mean of the other runs, would look like a better method."""
    for seed, mse in ((1, [3.0, 2.0, 1.0]), (2, [3.0, 0.5]), (3, [3.0, 2.0, float("nan")])):
        folder = tmp_path / f"a{seed}"
        write(folder, settings(seed), [0.1, 0.2, 0.3], [0.1, 0.9, 0.2])
        note(folder, "mse", test=mse, val=[3.0, 2.0, 1.0])
    (row,) = report_table(group_runs(find_runs([tmp_path])), ["mse"], last=2).to_dict("records")
    assert pd.isna([row["last"], row["last_std"], row["mean_last"]]).all()
    assert row["picked"] == pytest.approx((2.0 + 0.5 + 2.0) / 3)
    said = words(capsys, str(tmp_path), "--metric", "mse")
    assert "mse is undefined in the last round of 2 of 3 runs" in said


def test_of_tasks_only_the_last_one_is_compared(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(1), [0.9, 0.8, 0.3, 0.4], [0.9, 0.9, 0.6, 0.5])
    note(tmp_path / "a", "task", train=[0, 0, 1, 1])
    (row,) = report_table(group_runs([tmp_path / "a"])).to_dict("records")
    scores = [row[name] for name in ("last", "picked", "best_on_test", "mean_last")]
    assert scores == [0.4, 0.3, 0.4, 0.35]


def fitted(folder: Path, data: FederatedDataModule, **kwargs: Any) -> None:
    trainer(**{"rounds": 1, "run_dir": str(folder), **kwargs}).fit(classifier(), data)


def test_runs_that_differ_in_what_decides_nothing_are_one_group(tmp_path: Path) -> None:
    fitted(tmp_path / "a", digits(root=str(tmp_path / "here")), seed=1)
    watching = [RoundProgress(), GradientDissimilarity()]
    engine = InProcess(threads=2)
    fitted(tmp_path / "b", digits(), seed=2, callbacks=watching, engine=engine)
    logger = CSVLogger(tmp_path / "logs")
    fitted(tmp_path / "c", digits(root=str(tmp_path / "there")), seed=2, logger=logger)

    (group,) = group_runs(find_runs([tmp_path]))
    assert [folder.name for folder in group.runs] == ["a", "b", "c"]
    assert list((tmp_path / "logs").rglob("metrics.csv")), "Lightning's file is passed over"


def test_what_changes_training_makes_another_group(tmp_path: Path) -> None:
    class Mine(FedAvg):
        pass

    class Freezes(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            next(pl_module.parameters()).requires_grad_(False)

    fitted(tmp_path / "plain", digits())
    fitted(tmp_path / "stopping", digits(), callbacks=[RoundEarlyStopping()])
    fitted(tmp_path / "frozen", digits(), callbacks=[Freezes()])
    fitted(tmp_path / "epochs", digits(), max_epochs=2)
    fitted(tmp_path / "mine", digits(), aggregator=Mine())

    groups = group_runs(find_runs([tmp_path]))
    labels = {folder.name: group.label for group in groups for folder in group.runs}
    assert len(groups) == len(labels) == 5
    assert "RoundEarlyStopping" in labels["stopping"] and "Freezes" in labels["frozen"]
    assert "max_epochs=2" in labels["epochs"] and "Mine" in labels["mine"]


def test_a_second_callback_of_a_class_makes_another_group(tmp_path: Path) -> None:
    clips = [{"class_path": "mine.Clip", "init_args": {"norm": norm}} for norm in (1, 2)]
    write(tmp_path / "once", settings(1, callbacks=clips[1:]), [0.1])
    write(tmp_path / "twice", settings(1, callbacks=clips), [0.1])
    write(tmp_path / "turned", settings(1, callbacks=clips[::-1]), [0.1])
    assert len(group_runs(find_runs([tmp_path]))) == 3


@pytest.mark.long
def test_where_a_wrapped_set_lies_is_no_difference(tmp_path: Path) -> None:
    for seed in (1, 2):
        wrapped = digits(standardize=False, root=str(tmp_path / f"place{seed}"))
        tasks = TaskSequence(wrapped, tasks=2, classes_per_task=3, rounds_per_task=1)
        fitted(tmp_path / str(seed), tasks, seed=seed)

    (group,) = group_runs(find_runs([tmp_path]))
    assert len(group.runs) == 2


def test_a_setting_that_only_some_have_is_in_every_label(tmp_path: Path) -> None:
    some = settings(1)
    some["data"]["init_args"]["train_samples"] = 500
    write(tmp_path / "some", some, [0.1])
    write(tmp_path / "all", settings(1), [0.1])
    assert labels(tmp_path) == ["train_samples=500", "train_samples=None"]


def test_a_run_counts_once_and_a_seed_twice_is_said(runs: Path, capsys: Capture) -> None:
    assert len(find_runs([runs, runs / "a1"])) == 3
    write(runs / "again", settings(1), [0.1, 0.2, 0.3])
    write(runs / "unborn", settings(5), [])
    assert "FedAvg: seed 1 more than once" in words(capsys, str(runs))


def test_a_setting_left_open_is_one_that_is_not_there(tmp_path: Path) -> None:
    """Compare a run that is older than the setting with runs that have it."""
    write(tmp_path / "before", settings(1), [0.1])
    write(tmp_path / "since", settings(2, lr_decay=None), [0.1])
    decay = {"class_path": "flsuite.CosineDecay", "init_args": {"rounds": 3}}
    write(tmp_path / "falling", settings(1, lr_decay=decay), [0.1])
    groups = {group.label: len(group.runs) for group in group_runs(find_runs([tmp_path]))}
    assert sorted(groups.values()) == [1, 2] and any("CosineDecay" in label for label in groups)


# The axis, and the way to a target


@pytest.fixture
def races(tmp_path: Path) -> Path:
    """Return runs. FedAvg reaches 0.7 in two of three, FedAdam in all, FedYogi in none."""
    root = tmp_path / "races"
    write(root / "a1", settings(1), [0.1, 0.7, 0.6], times=[2.0, 4.0, 6.0])
    write(root / "a2", settings(2), [0.2, 0.6, 0.9], times=[3.0, 5.0, 9.0])
    write(root / "a3", settings(3), [0.2, 0.3, 0.4], times=[1.0, 2.0, 3.0])
    write(root / "b1", settings(1, "FedAdam"), [0.5, 0.8, 0.8], times=[1.0, 2.0, 3.0])
    write(root / "c1", settings(1, "FedYogi"), [0.1, 0.1, 0.1], times=[1.0, 2.0, 3.0])
    return root


def test_the_way_to_a_target_by_hand(races: Path) -> None:
    table = target_table(load(races), 0.7).set_index("method")
    assert table["reached"].to_dict() == {"FedAdam": 1, "FedAvg": 2, "FedYogi": 0}
    assert table["runs"].to_dict() == {"FedAdam": 1, "FedAvg": 3, "FedYogi": 1}
    assert table.loc["FedAvg", "virtual_s"] == (4 + 9) / 2
    assert table.loc["FedAvg", "virtual_s_std"] == pytest.approx(12.5**0.5)
    assert table.loc["FedAdam", "virtual_s"] == 2 and pd.isna(table.loc["FedAdam", "virtual_s_std"])
    assert pd.isna(table.loc["FedYogi", "virtual_s"])

    title, _, heads, _, *rows = target_markdown(table.reset_index(), "accuracy 0.7").splitlines()
    assert title == "To accuracy 0.7, means of runs that reach it:"
    column = heads.split(" | ").index("virtual s")
    cells = {row.split(" | ")[0]: row.split(" | ") for row in rows}
    assert {name: (row[column], row[-1]) for name, row in cells.items()} == {
        "| FedAdam": ("2", "1 of 1 |"),
        "| FedAvg": ("6.5 ± 3.54", "2 of 3 |"),
        "| FedYogi": ("", "0 of 1 |"),
    }


POINTS = {"round": 2.5, "virtual_s": 6.5, "wall_s": 106.5, "client_updates": 12.5, "bytes": 2.5e6}
"""Where FedAvg reaches 0.7, on each axis."""


@pytest.mark.parametrize(("x", "shown"), [("wall_s", "106±3.54"), ("client_updates", "12.5±3.54")])
def test_the_chosen_axis_has_spreads(x: str, shown: str, races: Path, capsys: Capture) -> None:
    out = ran(capsys, str(races), "--x", x, "--target", "0.7")
    assert "to test accuracy 0.7: means of runs that reach it" in " ".join(out.split())
    assert "is the first" not in out, "only FedAdam reaches it in all runs"
    assert shown in out


def test_all_axes_are_in_one_table(races: Path, capsys: Capture) -> None:
    output = races.parent / "out"
    out = ran(capsys, str(races), "--target", "0.7", "--output", str(output))
    words = " ".join(out.replace("│", " ").split())
    assert "FedAdam 2 2 102 10 2 1 of 1" in words
    assert "FedAvg 2.5±0.707 6.5 106 12.5 2.5 2 of 3" in words and "FedYogi 0 of 1" in words
    rows = [line for line in out.splitlines() if line.endswith((" of 1", " of 3"))]
    assert len(rows) == 3 and max(map(len, rows)) <= 80, "no cell is wrapped"
    table = pd.read_csv(output / "target.csv").set_index("method")
    assert table.loc["FedAvg", list(POINTS)].to_dict() == POINTS
    assert (table.loc["FedAvg", "runs"], table.loc["FedAvg", "reached"]) == (3, 2)
    assert "To test accuracy 0.7, means of" in (output / "report.md").read_text("utf-8")
    assert (output / "report.png").is_file()


def test_a_loss_reaches_its_target_from_above(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(1), [3.0, 1.5, 0.5], times=[1.0, 2.0, 3.0], metric="loss")
    results = load(tmp_path)
    for target, round in ((3.5, 1), (1.5, 2), (1.0, 3)):
        (row,) = target_table(results, target, "loss").to_dict("records")
        assert (row["round"], row["reached"]) == (round, 1)
    (row,) = target_table(results, 0.1, "loss").to_dict("records")
    assert pd.isna(row["round"]) and row["reached"] == 0


def test_the_target_can_be_one_on_validation_data(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a", settings(1), [0.1, 0.2], val=[0.3, 0.8], times=[1.0, 2.0])
    out = ran(capsys, str(tmp_path), "--split", "val", "--target", "0.7")
    assert "to val accuracy 0.7" in out and "1 of 1" in out


def test_of_tasks_only_the_last_one_has_a_target(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(1), [0.9, 0.8, 0.3, 0.6])
    note(tmp_path / "a", "task", train=[0, 0, 1, 1])
    (row,) = target_table(load(tmp_path), 0.5).to_dict("records")
    assert row["round"] == 4


def test_the_first_group_is_named_with_the_next_one(races: Path, capsys: Capture) -> None:
    out = ran(capsys, str(races), "--x", "virtual_s", "--target", "0.4")
    # FedAdam after 1 second, FedAvg after 4, 5 and 3.
    assert (
        "FedAdam is the first to reach test accuracy 0.4, after 1 virtual s; FedAvg is next, after "
        "4 virtual s (4.00 times as many)\n"
    ) in out


def test_groups_that_are_first_together_are_all_named(races: Path, capsys: Capture) -> None:
    out = ran(capsys, str(races), "--target", "0.1")
    assert (
        "FedAdam, FedAvg and FedYogi are the first to reach test accuracy 0.1, after 1 round\n"
        in out
    )


def test_curves_of_runs_with_different_times_share_their_points(races: Path) -> None:
    (average,) = (g for g in group_runs(find_runs([races])) if g.label == "FedAvg")
    rows = only(results_of([average]), "accuracy")
    curves = seed_curves(rows, "virtual_s")
    assert curves.index.tolist() == [3.0], "run 2 starts when run 3 ends"
    assert sorted(curves.loc[3.0]) == [0.1, 0.2, 0.4]
    assert seed_curves(rows, "round").index.tolist() == [1, 2, 3]

    panel = curves_figure(results_of([average]), "accuracy", x="bytes", target=0.7).axes[0]
    curve, target = panel.lines
    assert list(curve.get_xdata()) == [1.0, 2.0, 3.0] and panel.get_xlabel().startswith("MB")
    assert set(target.get_ydata()) == {0.7} and target.get_linestyle() == "--"


@pytest.mark.parametrize("others", [1, 6])
def test_runs_without_a_score_are_named_or_counted(tmp_path: Path, others: int) -> None:
    write(tmp_path / "one", settings(1), [0.1, 0.2], times=[1.0, 2.0])
    for n in range(others):
        other = settings(1, lr=0.2 + n)
        write(tmp_path / f"other-{n}", other, [0.1, 0.2], times=[1.0, 2.0], metric="loss")
    lines = apart(group_runs(find_runs([tmp_path])), "accuracy", "test", "round")
    if others == 1:
        assert lines == ["lr=0.2: its runs have no test accuracy; it is not drawn"]
    else:
        assert lines == ["6 of 7 rows have no test accuracy and no curve"]


def test_runs_that_share_no_time_are_named(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a1", settings(1), [0.1, 0.2], times=[1.0, 2.0])
    write(tmp_path / "a2", settings(2), [0.1, 0.2], times=[3.0, 4.0])
    out = ran(capsys, str(tmp_path), "--x", "virtual_s", "--output", str(tmp_path / "out"))
    assert "no virtual_s of test accuracy in common" in " ".join(out.split())


def test_runs_of_equal_work_may_differ_in_rounds(tmp_path: Path, capsys: Capture) -> None:
    def write_run(name: str, schedule: dict[str, Any], updates: list[int]) -> None:
        chosen = settings(1, schedule=schedule, max_client_updates=20)
        write(tmp_path / name, chosen, [0.5] * len(updates))
        table = pd.read_csv(tmp_path / name / "metrics.csv")
        table.assign(client_updates=updates).to_csv(tmp_path / name / "metrics.csv", index=False)

    stragglers = {"class_path": "flsuite.federation.Stragglers", "init_args": {"fraction": 0.3}}
    waits = {"class_path": "flsuite.federation.Synchronous", "init_args": {"speeds": None}}
    flows = {"class_path": "flsuite.federation.Asynchronous", "init_args": {"speeds": stragglers}}
    write_run("waits", waits, [11, 22])  # its last round goes beyond the limit
    write_run("flows", flows, [5, 10, 15, 20])

    printed = words(capsys, str(tmp_path), "--x", "virtual_s")
    assert "ends with round" not in printed
    assert printed.count("its virtual seconds were measured") == 1
    assert "virtual seconds were measured" in printed

    write_run("short", flows, [5, 10])
    printed = words(capsys, str(tmp_path))
    assert "1 run is not finished and left out:" in printed and "ends with round 2" in printed
    assert "were measured" not in printed and "short" not in printed.split("not finished")[0]


# Pairs, and the tuning


def test_pairs_are_compared_and_written(tmp_path: Path, capsys: Capture) -> None:
    for seed, more in ((1, 0.01), (2, 0.02), (3, 0.03)):
        write(tmp_path / f"a{seed}", settings(seed), [0.1, 0.5])
        write(tmp_path / f"b{seed}", settings(seed, "FedAdam"), [0.1, 0.5 + more])
    out = words(capsys, str(tmp_path), "--output", str(tmp_path / "out"))
    # Differences 0.01, 0.02, 0.03: mean 0.02, standard error 0.01 / sqrt(3), t = 2 sqrt(3) with two
    # degrees of freedom, where p = 1 - t / sqrt(t^2 + 2) and the quantile is 4.302653.
    assert "FedAdam - FedAvg" in out
    assert "+0.0200" in out and "-0.0048 to +0.0448" in out and "0.0742" in out
    assert "Wilcoxon, sign-flip) cannot go below p = 0.25" in out
    (row,) = pd.read_csv(tmp_path / "out" / "comparison.csv").to_dict("records")
    assert row["p"] == pytest.approx(1 - (12 / 14) ** 0.5)
    assert row["high"] == pytest.approx(0.02 + 4.302653 * 0.01 / 3**0.5)
    markdown = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    pair = "| FedAdam - FedAvg | 3 | +0.0200 | -0.0048 to +0.0448 | 0.0742 | 0.0742 |"
    assert pair in markdown.splitlines() and "Holm's correction over 1 pair." in markdown


def test_against_compares_with_one_method(tmp_path: Path, capsys: Capture) -> None:
    for seed in (1, 2):
        for n, method in enumerate(("FedAvg", "FedAdam", "FedYogi")):
            write(tmp_path / f"{method}{seed}", settings(seed, method), [0.1, 0.1 * n * seed])
    out = words(capsys, str(tmp_path), "--against", "FedAvg")
    assert "over 2 pairs" in out
    line = refused(capsys, "report", str(tmp_path), "--against", "FedSGD")
    assert "there is no method 'FedSGD'" in line


def test_the_budget_of_the_tuning_is_shown(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "FedProx-0a1b2c3d" / "seed-1", settings(1, "FedProx"), [0.5])
    write(tmp_path / "tuning" / "FedProx-1a1b2c3d" / "seed-101", settings(101, "FedProx"), [0.9])
    lines = ["method,grid point,trial,values,score,chosen"]
    lines += [f'FedProx,alpha=0.3,{n},"{{""mu"": {n}}}",0.{n},{n == 2}' for n in (1, 2, 3)]
    lines += ["FedProx,alpha=0.3,4,,,False"]
    (tmp_path / "tuning.csv").write_text("\n".join(lines) + "\n")
    for place in (tmp_path, tmp_path / "FedProx-0a1b2c3d"):
        out = ran(capsys, str(place))
        row = next(line for line in out.splitlines() if '{"mu": 2}' in line)
        cells = [cell.strip() for cell in row.split("│")]
        assert cells == ["FedProx", "alpha=0.3", '{"mu": 2}', "3", "0.2"], "as on the page"
        assert "0.900" not in out, "a trial is not a result"


def test_a_table_that_is_not_the_tunings_is_named(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a", settings(1), [0.5])
    (tmp_path / "tuning.csv").write_text("lr,score\n0.1,0.5\n")
    assert cli("report", str(tmp_path)) == 2
    assert "lacks the columns method, grid point" in capsys.readouterr().err


def test_runs_that_are_not_finished_are_left_out(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "whole", settings(0), [0.1, 0.2, 0.3])
    write(tmp_path / "killed", settings(0, "FedYogi"), [0.9])
    out = words(capsys, str(tmp_path))
    assert "FedYogi" not in out and "0.300" in out
    assert "1 run is not finished and left out: " in out and "ends with round 1" in out
    (tmp_path / "whole" / "metrics.csv").unlink()
    out = ran(capsys, str(tmp_path))
    assert "0.900" in out and "left out" not in out, "alone, it shows how far it is"


def test_a_run_that_a_callback_ended_is_finished(tmp_path: Path, capsys: Capture) -> None:
    stop = {"class_path": "flsuite.callbacks.StopAt", "init_args": {"value": 0.9}}
    write(tmp_path / "whole", settings(0), [0.1, 0.2, 0.3])
    write(tmp_path / "stopped", settings(0, "FedYogi", stopping=[stop]), [0.9])
    (tmp_path / "stopped" / "curves.png").touch()  # drawn at the end
    out = words(capsys, str(tmp_path))
    assert "FedYogi" in out and "left out" not in out


def test_many_short_runs_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "whole", settings(0), [0.1, 0.2, 0.3])
    for seed in range(1, 7):
        rounds = 1 + seed % 2
        write(tmp_path / f"short-{seed}", settings(seed, rounds=rounds), [0.1] * rounds)
    out = words(capsys, str(tmp_path))
    assert "6 of 7 runs end with rounds 1 to 2 of 3" in out and "short-1 ends" not in out


def test_a_score_of_many_models_has_a_star(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for method in ("FedAvg", "Ditto"):
        method_of = ("--trainer.aggregator", method, "--run_dir", f"runs/{method}")
        small = ("--trainer.rounds", "1", "--data.train_samples", "200", "--data.clients", "3")
        assert cli("fit", "--config", QUICKSTART, *small, *method_of) == 0
    capsys.readouterr()
    pages = ("--output", "out", "--html", "page.html")
    assert cli("report", "runs", "--metric", "accuracy", *pages) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.partition("│")[0].strip() for line in lines if "│" in line]
    assert "FedAvg" in rows and "Ditto *" in rows
    assert any(line.startswith("* accuracy of Ditto is the mean over the ") for line in lines)
    said = "* accuracy of Ditto is the mean over the clients' own models"
    text = Path("out/report.md").read_text()
    assert "| Ditto \\* | accuracy |" in text and f"\\{said}" in text and "FedAvg \\*" not in text
    page = unescape(Path("page.html").read_text())
    assert ">Ditto\N{NO-BREAK SPACE}*</a>" in page and said in page and ">FedAvg</a>" in page
