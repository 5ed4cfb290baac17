"""The command: the folder that a run leaves, and the line that a refused request prints."""

import errno
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from flsuite import __version__
from flsuite.aggregators import LinearRule, Objective
from flsuite.data import Digits, Dirichlet
from flsuite.models import MLP, Classifier
from flsuite.runs.table import MetricsTable
from flsuite.trainer import FederatedTrainer
from tests.commands.command import CONFIGS, QUICKSTART, Capture, cli, files, refused
from tests.conftest import equal_states, mostly_long

SHORT = ("fit", "--config", QUICKSTART, "--trainer.rounds", "1")
SMALL = ("--trainer.max_epochs", "1", "--model.backbone.hidden", "[4]")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a short quickstart by the command, and give its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("quickstart"))
        patch.setattr(sys, "argv", list(sys.argv))
        patch.setattr(sys, "path", list(sys.path))
        assert cli("fit", "--config", QUICKSTART, "--trainer.rounds", "3") == 0
        (folder,) = (Path.cwd() / "runs" / "quickstart").iterdir()
        yield folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    """Copy the finished run, so that a test may change it."""
    return Path(shutil.copytree(finished, tmp_path / "runs" / "quickstart" / finished.name))


def final_state(folder: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / name, weights_only=True)["federation"]["state"]


def score(folder: Path, split: str, metric: str, round: int) -> float:
    table = pd.read_csv(folder / "metrics.csv")
    named = table.set_index(["scope", "split", "metric", "round"])["value"]
    return float(named["global", split, metric, round])


# The folder that a run leaves


def test_a_run_leaves_everything_in_its_folder(finished: Path) -> None:
    date, _, seed = finished.name.rpartition("-")
    assert time.strptime(date, "%Y%m%d-%H%M%S-%f") and seed == "1"
    assert files(finished).keys() == {
        *("config.yaml", "settings.yaml", "versions.txt", "curves.png", "partition.png"),
        *("metrics.csv", "partition.csv", "timeline.csv"),
        *(f"checkpoints/{name}.ckpt" for name in ("last", "best", "model")),
    }
    header, *rows = (finished / "metrics.csv").read_text().splitlines()
    assert header == ",".join(MetricsTable.columns)
    assert {row.split(",")[0] for row in rows} == {"1", "2", "3"}
    assert f"torch {torch.__version__.split('+')[0]}" in (finished / "versions.txt").read_text()
    for picture in ("curves.png", "partition.png"):
        assert (finished / picture).read_bytes().startswith(b"\x89PNG")


def test_short_names_are_resolved_in_the_saved_config(finished: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["class_path"] == "flsuite.models.Classifier"
    assert config["model"]["init_args"]["backbone"]["class_path"] == "flsuite.models.MLP"
    assert config["data"]["init_args"]["partition"]["class_path"] == "flsuite.data.Dirichlet"
    assert config["trainer"]["aggregator"]["class_path"] == "flsuite.aggregators.FedAvg"
    numbers = (config["trainer"]["rounds"], config["trainer"]["max_epochs"])
    assert (*numbers, config["seed_everything"]) == (3, 2, 1)


def test_the_saved_config_makes_the_same_weights(finished: Path, tmp_path: Path) -> None:
    assert cli("fit", "--config", str(finished / "config.yaml"), "--run_dir", "again") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    assert equal_states(final_state(tmp_path / "again"), final_state(finished))
    ours, theirs = ((run / "config.yaml").read_bytes() for run in (tmp_path / "again", finished))
    assert ours == theirs


@pytest.mark.parametrize(
    ("command", "split", "ckpt_path"),
    [
        pytest.param("test", "test", None, marks=pytest.mark.long),
        ("test", "test", "best"),
        ("validate", "val", "last"),
    ],
)
def test_scores_from_the_saved_config(
    command: str, split: str, ckpt_path: str | None, run_folder: Path, capsys: Capture
) -> None:
    before = files(run_folder)
    request = ["--ckpt_path", ckpt_path] if ckpt_path else []
    assert cli(command, "--config", str(run_folder / "config.yaml"), *request) == 0
    name = f"{ckpt_path or 'last'}.ckpt"
    content = torch.load(run_folder / "checkpoints" / name, weights_only=True)
    round = content["federation"]["clock"]["round"]
    out = capsys.readouterr().out
    assert f"{split} scores of round {round}" in out
    shown = next(line for line in out.splitlines() if "global accuracy" in line)
    assert f"{score(run_folder, split, 'accuracy', round):.4f}" in shown
    assert "accuracy of class 9 " in out and "accuracy/" not in out
    assert files(run_folder) == before


def test_predictions(run_folder: Path) -> None:
    assert cli("predict", "--config", str(run_folder / "config.yaml")) == 0
    table = pd.read_csv(run_folder / "predictions.csv")
    probabilities = [f"p_{c}" for c in range(10)]
    assert list(table.columns) == [
        *("sample", "client", "model", "target", "prediction"),
        *probabilities,
    ]
    assert set(table["model"]) == {"global"} and table["client"].nunique() > 1
    # The published test samples follow the training samples, as in NAME-samples.csv.
    assert len(table) == 360 and table["sample"].tolist() == list(range(1437, 1797))
    assert np.allclose(table[probabilities].sum(axis=1), 1, atol=1e-4)
    assert (table["prediction"] == table[probabilities].to_numpy().argmax(axis=1)).mean() > 0.99
    accuracy = (table["prediction"] == table["target"]).mean()
    assert accuracy == pytest.approx(score(run_folder, "test", "accuracy", 3))


def test_a_run_of_the_command_can_be_opened_in_python(finished: Path) -> None:
    """Check that defaults which only the command writes out are no difference."""
    made = FederatedTrainer(
        rounds=3, max_epochs=2, run_dir=str(finished), seed=1, enable_progress_bar=False
    )
    model = Classifier(MLP(hidden=(64,)), partial(torch.optim.SGD, lr=0.1))
    data = Digits(clients=10, partition=Dirichlet(0.3), batch_size=16)
    assert made.test(model, data, ckpt_path="last")[0]["accuracy"] == pytest.approx(
        score(finished, "test", "accuracy", 3)
    )


DRAWN = ("partition", "--config", QUICKSTART, "--output", "drawn")


@pytest.mark.long
def test_partition_finds_the_classes_of_a_config_that_nothing_has_imported() -> None:
    subprocess.run([sys.executable, "-m", "flsuite", *DRAWN], check=True)


@pytest.mark.draws
def test_partition_draws_the_split_of_a_run(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert cli(*DRAWN) == 0
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        "quickstart-partition.csv",
        "quickstart-partition.png",
        "quickstart-samples.csv",
    ]
    assert (tmp_path / "drawn" / "quickstart-partition.png").read_bytes().startswith(b"\x89PNG")
    drawn = pd.read_csv(tmp_path / "drawn" / "quickstart-partition.csv")
    assert drawn.equals(pd.read_csv(finished / "partition.csv"))
    assert list(drawn.columns) == ["client", "split", "class", "samples"]
    out = capsys.readouterr().out
    assert "training samples" in out and "drawn/quickstart-partition.png" in out


def test_print_config_is_a_config(capsys: Capture, tmp_path: Path) -> None:
    adam = ("--trainer.aggregator", "FedAdam", "--trainer.aggregator.lr", "0.5")
    assert cli(*SHORT, *adam, "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["rounds"] == 1
    assert config["trainer"]["aggregator"]["class_path"].endswith("FedAdam")
    assert config["trainer"]["aggregator"]["init_args"]["lr"] == 0.5
    assert not list(tmp_path.iterdir())


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["flsuite", "--version"])
    runpy.run_module("flsuite", run_name="__main__")
    installed = f"torch {metadata.version('torch')}, lightning {metadata.version('lightning')}"
    assert capsys.readouterr().out == f"flsuite {__version__} ({installed})\n"


@pytest.mark.parametrize("args", [("--version",), ("fit", "--help")])
def test_help_is_there_at_once(args: tuple[str, ...]) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "flsuite", *args],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert time.monotonic() - began < 2
    assert done.stdout.startswith(("flsuite ", "usage: flsuite "))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "flsuite.commands.main" in imported
    assert not imported & {"torch", "lightning", "numpy", "matplotlib", "jsonargparse"}


# A user's own package

PACKAGE = '''
"""A user's own classes."""

import numpy as np

from dataclasses import dataclass

from flsuite.aggregators import Mean
from flsuite.data import Partition


@dataclass(frozen=True)
class Halfway(Mean):
    """A rule that goes only a part of the way to the mean."""

    part: float = 0.5

    def result(self, server, sums, updates):
        mean = super().result(server, sums, updates)
        return {k: v + self.part * (mean[k] - v) for k, v in server.state.items()}


class Stripes(Partition):
    """Assigns samples to clients in turn."""

    def __call__(self, labels, clients, rng, ids=None):
        return [np.arange(client, len(labels), clients) for client in range(clients)]
'''


def test_a_users_own_classes_go_by_their_short_names(tmp_path: Path) -> None:
    (tmp_path / "my_own_classes").mkdir()
    (tmp_path / "my_own_classes" / "__init__.py").write_text(PACKAGE)
    mine = ("--trainer.aggregator", "Halfway", "--trainer.aggregator.part", "0.25")
    mine += ("--data.partition", "Stripes", *SMALL)
    try:
        assert cli(*SHORT, "--plugins", "[my_own_classes]", *mine, "--run_dir", "run") == 0
        config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert config["trainer"]["aggregator"] == {
            "class_path": "my_own_classes.Halfway",
            "init_args": {
                "weighting": "samples",
                "staleness": "polynomial",
                "normalize": "buffer",
                "rate": 1.0,
                "part": 0.25,
            },
        }
        assert config["data"]["init_args"]["partition"]["class_path"] == "my_own_classes.Stripes"
        counts = pd.read_csv(tmp_path / "run" / "partition.csv").groupby("client")["samples"].sum()
        # Stripes are even but for the test samples' rounding.
        assert counts.max() - counts.min() < 45
        sys.modules.pop("my_own_classes")
        assert cli("test", "--config", "run/config.yaml") == 0
    finally:
        sys.modules.pop("my_own_classes", None)


# Requests that cannot be met


class Unfinished(LinearRule):
    """Has no terms and no result."""


class Untyped(Objective):
    """Needs an argument, and does not say of which type."""

    def __init__(self, strength) -> None:  # type: ignore[no-untyped-def]
        self.strength = strength


BAD_ARGUMENTS = {
    "part_of_a_rule": (
        "--trainer.aggregator Krum --trainer.aggregator.objective Proximal",
        "Krum has its own; class_path Aggregator takes all four",
    ),
    "not_a_number": (
        "--trainer.max_epochs x",
        "trainer.max_epochs: expected a whole number (at least 1), got 'x'",
    ),
    "not_a_number_or_tensor": (
        "--model.optimizer.lr abc",
        "model.optimizer.lr: expected a number or Tensor, got 'abc'",
    ),
    "not_one_of_two_kinds": (
        "--trainer.schedule.participation x",
        "trainer.schedule.participation: expected a number (a share above 0",
    ),
    "bare_transform": ("--trainer.compression Transform", "name a specific Transform: ClipUpdates"),
    "half_a_class": ("--trainer.lr_decay.rounds 3", "name a specific LRDecay: "),
    "no_argument_of_a_class": (
        "--data.partition Pathological",
        "data.partition: the following arguments are required: classes_per_client",
    ),
    "unfinished_rule": (
        "--trainer.aggregator.rule tests.commands.test_main.Unfinished",
        "Unfinished lacks result, terms; write what its base class asks for",
    ),
    "no_argument_without_a_type": (
        "--trainer.aggregator FedAvg --trainer.aggregator.objective "
        "tests.commands.test_main.Untyped",
        "trainer.aggregator.objective.strength: expected a value, got null; give one",
    ),
    "no_such_device": (
        "--trainer.accelerator gpuu",
        "trainer: Lightning refuses it (You selected an invalid accelerator name",
    ),
    "unknown_model": ("--model Klassifier", "did you mean Classifier?"),
    "a_plugin_by_its_file": ("--plugins [trim.py]", "a module has no .py: trim"),
    "no_plugin": ("--plugins [my_missing_package]", "plugins: cannot import 'my_missing_package'"),
    "alpha_zero": ("--data.partition.alpha 0", "Dirichlet: alpha must be positive"),
    "a nested argument": (
        "--trainer.aggregator FedFisher --trainer.aggregator.noise.noise_multiplier -2",
        "SampleNoise: noise_multiplier must be positive, got -2",
    ),
    # The key takes an algorithm too, and the parser lists a reason for each of the two.
    "a_rule": (
        "--trainer.aggregator Krum --trainer.aggregator.byzantine -1",
        "flsuite: error: Krum: byzantine must be at least 0",
    ),
    "no_argument_of_a_rule": (
        "--trainer.aggregator Bucketing",
        "flsuite: error: trainer.aggregator: the following arguments are required: rule",
    ),
    "unknown_monitor": ("--trainer.monitor acc", "trainer: monitor must be one of accuracy"),
    "negative_seed": ("--seed_everything -1", "seed_everything"),
    "a_checkpoint_that_has_almost_its_name": (
        "--ckpt_path bests",
        "no checkpoint bests; did you mean best?",
    ),
    "no_such_checkpoint": (
        "--ckpt_path nowhere.ckpt",
        "no checkpoint nowhere.ckpt; name a file in a run's folder checkpoints",
    ),
    "data_not_there": (
        "--data MedMNIST --data.name breastmnist --data.root nowhere --data.download false",
        "breastmnist.npz is not in nowhere",
    ),
    "unknown_data_set": (
        "--data MedMNIST --data.name brestmnist",
        "3d, got 'brestmnist'",
    ),
}


@pytest.mark.parametrize(("args", "words"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line(args: str, words: str, capsys: Capture) -> None:
    assert words in refused(capsys, *SHORT, *args.split())


BAD_LINES = {
    "of_data": (
        "clients: 10",
        "clientz: 10",
        "bad.yaml: unknown key data.clientz (did you mean data.clients?)",
    ),
    "value": (
        "clients: 10",
        "clients: ten",
        "data.clients: expected a whole number (at least 1), got 'ten'",
    ),
    "not_yaml": ("model:", "model: [", "is not valid YAML (line "),
    "tab": ("  rounds", "\trounds", "bad.yaml is not valid YAML (line 18: found character that"),
    "a_key_twice": ("model:", "trainer: {}\nmodel:", "'trainer' appears twice; rename one"),
    "no_date": ("model:", "x: 2024-13-45\nmodel:", "is not valid YAML (month must be in 1..12)"),
}


@pytest.mark.parametrize(("good", "bad", "words"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_config_is_one_line(
    good: str, bad: str, words: str, tmp_path: Path, capsys: Capture
) -> None:
    text = Path(QUICKSTART).read_text()
    assert good in text
    (tmp_path / "bad.yaml").write_text(text.replace(good, bad))
    assert words in refused(capsys, "fit", "--config", "bad.yaml")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("fti",), "unknown command 'fti'; did you mean fit?"),
        (("bogus",), "unknown command 'bogus'; there are: fit, validate, test, predict, new"),
        (("report", "runs", "--metrc", "f1"), "did you mean --metric?"),
        (("fit", "--config", "nowhere.yaml"), "no config file nowhere.yaml; flsuite new NAME"),
        (("fit", "--config", str(CONFIGS / "quikstart.yaml")), f"did you mean {QUICKSTART}?"),
        (("fit", "--config"), "--config needs a file"),
        (("fit", "--config", QUICKSTART, "--run_dir", "\udcff"), "are not UTF-8 text"),
        (("fit",), "fit: give a config, as --config configs/quickstart.yaml"),
        (("partition", "--config", QUICKSTART, "--bogus", "3"), "unknown key --bogus"),
        (("test", "--config", QUICKSTART), "fit first"),
        (("predict", "--config", QUICKSTART, "--ckpt_path", "best"), "there is no checkpoint"),
    ],
    ids=lambda value: "-".join(value[:1]) if isinstance(value, tuple) else "",
)
def test_a_bad_request_is_one_line(args: tuple[str, ...], words: str, capsys: Capture) -> None:
    assert words in refused(capsys, *args)


def test_a_model_larger_than_the_memory_is_one_line(capsys: Capture) -> None:
    assert cli(*SHORT, "--model.backbone.hidden", "[1000000000000]") == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("flsuite: error: out of memory (")


def test_an_empty_config_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert "empty.yaml is not a config" in refused(capsys, "fit", "--config", "empty.yaml")


PLACES = {
    "link": ("link", "link is a link to a missing place; name another folder"),
    "below": ("link/below", "link is a link to a missing place; name another folder"),
    "long": ("a" * 300, "aaa...: File name too long; choose a shorter name"),
    "file": ("file", "to file/checkpoints: Not a directory; name another folder"),
    "below a file": ("file/below", "file/below/checkpoints: Not a directory; name another folder"),
}


@pytest.mark.parametrize("case", mostly_long(PLACES, "below", "long", "below a file"))
def test_a_place_that_no_folder_can_have_is_one_line(
    case: tuple[str, str], tmp_path: Path, capsys: Capture
) -> None:
    place, message = case
    (tmp_path / "link").symlink_to("missing")
    (tmp_path / "file").write_text("precious")
    line = refused(capsys, *SHORT, "--run_dir", place)
    assert line.endswith(message) and len(line) < 250


def test_a_working_folder_that_was_deleted_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for args in (["ls"], ["fit", "--help"]):
        assert cli(*args) == 2
        assert "the working folder does not exist any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (OSError(errno.EFBIG, "File too large", "x.csv"), 1, "x.csv: File too large; raise the li"),
        (OSError(errno.ENOSPC, "No space left", "x.csv"), 1, "x.csv: No space left; free some spa"),
        (OSError(errno.EACCES, "No permission", "x.csv"), 2, "x.csv: No permission; change its pe"),
        (OSError(errno.EIO, "Input/output error", "x"), 1, "x: Input/output error"),
        (OSError("torn"), 1, "torn"),
    ],
)
def test_an_error_of_the_system_names_the_file_and_what_to_do(
    error: OSError, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("flsuite.commands.main.dispatch", fail)
    assert cli("ls") == status
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"flsuite: error: {line}")


def test_a_folder_with_a_run_is_left_alone(run_folder: Path, capsys: Capture) -> None:
    assert "already holds a run" in refused(capsys, *SHORT, "--run_dir", str(run_folder))


def test_resuming_with_another_config_names_the_difference(
    run_folder: Path, capsys: Capture
) -> None:
    resume = ("--run_dir", str(run_folder), "--ckpt_path", "last", "--model.optimizer.lr", "0.2")
    line = refused(capsys, "fit", "--config", QUICKSTART, *resume)
    assert "model.optimizer.lr is 0.2 here and 0.1 there" in line


@pytest.mark.long
def test_the_command_itself_prints_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flsuite", *SHORT, "--trainer.rounds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "flsuite: error: trainer: rounds must be at least 1, got 0\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_usual_logger_writes_into_the_runs_folder(tmp_path: Path) -> None:
    assert cli(*SHORT, *SMALL, "--trainer.logger", "true", "--run_dir", "run") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert list((tmp_path / "run" / "lightning_logs").glob("version_0/*"))
