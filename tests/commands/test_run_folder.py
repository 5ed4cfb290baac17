"""A run's folder in place of options: test, validate, predict and resume."""

import shlex
from pathlib import Path

import pytest
import yaml

from flsuite.analysis import read_metrics
from flsuite.commands.parsers import parser_of
from flsuite.commands.parsing import config_name
from flsuite.commands.request import require_run, with_run_folder
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import SWEEP
from tests.commands.command import QUICKSTART, Capture, cli, refused
from tests.conftest import classifier, digits, trainer

FIT = (
    *("fit", "--config", QUICKSTART, "--trainer.rounds", "1", "--trainer.max_epochs", "1"),
    *("--data.clients", "3", "--data.train_samples", "200"),
)
RUN = "runs/quickstart/one"


@pytest.mark.long
def test_a_folder_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert cli(*FIT, "--run_dir", RUN) == 0

    # From another folder, too.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = f"../{RUN}"
    capsys.readouterr()
    assert cli("test", run) == 0
    assert "test scores of round 1" in capsys.readouterr().out
    assert cli("validate", run, "--ckpt_path", "best") == 0
    assert "val scores of round" in capsys.readouterr().out
    assert cli("predict", run) == 0
    assert (tmp_path / RUN / "predictions.csv").is_file()
    assert cli("resume", run, "--trainer.rounds", "2") == 0
    assert read_metrics(run)["round"].max() == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_stands_for_options(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    run = str(tmp_path / "run")
    options = ["--config", f"{run}/config.yaml", "--run_dir", run]
    more = ["--ckpt_path", "best"]
    assert with_run_folder("test", [run, *more]) == ("test", [*options, *more])
    assert with_run_folder("resume", [run, *more]) == (
        "fit",
        [*options, "--ckpt_path", "last", *more],
    )
    assert with_run_folder("test", options) == ("test", options)
    assert with_run_folder("fit", []) == ("fit", [])


def make_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {}, "data": {}, "trainer": {}}))
    (folder / "metrics.csv").touch()


def test_the_nearest_runs_are_named(capsys: Capture) -> None:
    for name in ("20260101-1", "20260102-1"):
        make_run(Path("runs/quickstart") / name)
    for wrong in ("runs/quickstart", "runs/quickstart/20260101-2", "runs/quickstar/20260101-1"):
        line = refused(capsys, "test", wrong)
        assert f"test: {wrong} is not a run" in line
        assert (
            "did you mean runs/quickstart/2026010" in line and "runs/quickstart/20260101-1" in line
        )
    assert "nowhere is not a run, it is not a folder" in refused(capsys, "resume", "nowhere")


def test_a_fit_of_a_run_is_a_resume(capsys: Capture) -> None:
    make_run(Path("run"))
    assert "flsuite resume run" in refused(capsys, "fit", "run")
    assert "resume: name the folder of a run" in refused(capsys, "resume", "--trainer.rounds", "3")
    Path("run", "config.yaml").unlink()  # the table is written first
    assert "has no config.yaml; if it was killed at its start, remove" in refused(
        capsys, "resume", "run"
    )


def test_a_run_from_python_says_so(tmp_path: Path) -> None:
    trainer(rounds=1, run_dir=tmp_path / "run").fit(classifier(), digits())
    with pytest.raises(FlsuiteError, match="was run from Python"):
        with_run_folder("test", [str(tmp_path / "run")])


def test_an_empty_config_is_damaged(tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.csv"):
        (tmp_path / name).touch()
    with pytest.raises(FlsuiteError, match=r"config\.yaml is empty or damaged; restore it"):
        require_run("test", tmp_path)


def test_the_default_name_is_that_of_the_config_or_of_the_run(tmp_path: Path) -> None:
    deep, flat = tmp_path / "runs" / "digits" / "1", tmp_path / "runs" / "first"
    for folder in (deep, flat):
        folder.mkdir(parents=True)
        (folder / "settings.yaml").touch()

    assert config_name([], "flsuite") == "flsuite"
    assert config_name(["a.yaml", "configs/quickstart.yaml"], "") == "quickstart"
    assert config_name([deep / "config.yaml"], "") == "digits"
    assert config_name([flat / "config.yaml"], "") == "first-again"
    assert config_name([tmp_path / "config.yaml"], "") == "config", "not that of a run"


def test_a_fit_ends_with_what_comes_next_unless_it_is_a_cell(
    tmp_path: Path, capsys: Capture
) -> None:
    assert cli(*FIT, "--run_dir", "my runs/one") == 0
    *_, report, fork = capsys.readouterr().out.splitlines()
    assert report.startswith("next: flsuite report 'my runs/one' --output report ")
    assert fork.lstrip().startswith("flsuite fork 'my runs/one' --at 0 --without 0 ")
    for line in (report, fork):  # both can be typed as they are
        _, command, *args = shlex.split(line.removeprefix("next:"), comments=True)
        parser_of(command).parse_args(args)

    Path("s").mkdir()
    Path("s", SWEEP).write_text('{"methods": ["A"]}')
    assert cli(*FIT, "--run_dir", "s/A-00000000/seed-1") == 0
    assert "next:" not in capsys.readouterr().out
