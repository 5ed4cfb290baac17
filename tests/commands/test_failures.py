"""Code of a user that fails: one line says what, where and in which round."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from flsuite.aggregators import FedAvg, Objective, Rule
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.data import IID
from flsuite.federation.client.setup import remedy_of
from flsuite.runs.record import read_settings
from tests.commands import own_code as own
from tests.commands.command import QUICKSTART, Capture, cli
from tests.conftest import digits, trainer

OWN = "tests.commands.own_code"
ENGINES = ["InProcess", pytest.param("Processes", marks=pytest.mark.long), "Vectorized"]
FIT = ("fit", "--config", QUICKSTART, "--run_dir", "run", "--trainer.rounds", "2")


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The command adds a handler, which would keep the stderr of the first test.
    logger = logging.getLogger("flsuite")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)


def fit(model: str, *args: str) -> int:
    """Run the quickstart with an own model of :mod:`tests.commands.own_code`."""
    text = Path(QUICKSTART).read_text("utf-8")
    config = re.sub(r"(?ms)^model:\n.*?^(?=data:)", f"model: {{class_path: {OWN}.{model}}}\n", text)
    Path("own.yaml").write_text(config, "utf-8")
    return cli("fit", "--config", "own.yaml", *FIT[3:], "--trainer.max_epochs", "1", *args)


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_that_fail_alike_are_one_line(engine: str, capsys: Capture) -> None:
    assert fit("FailsAlways", "--trainer.engine", engine) == 1
    (line,) = capsys.readouterr().err.splitlines()
    cause = r"10 of 10 clients failed alike: ValueError: batch of 16 \(own_code.py, line \d+, in "
    assert re.match(rf"flsuite: error: round 1: {cause}FailsAlways.training_step\); ", line)
    assert line.endswith("the state of round 0 is kept; the traceback is in run/errors/round-1.txt")
    kept = Path("run/errors/round-1.txt").read_text("utf-8")
    assert kept.count("Traceback") == 1 and "ValueError: batch of 16\n" in kept


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_with_failures_ends_with_0_and_says_so(engine: str, capsys: Capture) -> None:
    assert fit("FailsAtTwo", "--trainer.engine", engine) == 0
    said = capsys.readouterr()
    alike = r"2 of 10 clients failed alike \(3, 4\): ValueError: no scanner \(own_code.py, line"
    failed = [line for line in said.err.splitlines() if re.match(rf"round [12]: {alike}", line)]
    assert len(failed) == 2
    assert re.search(r"fits failed +│ +4 of 20 │", said.out)
    assert "run: run (4 of 20 fits failed, see errors/)" in said.out.splitlines()
    next_command = said.out.splitlines()[-1].partition("#")[0].split()
    assert next_command == ["flsuite", "debug", "run", "--at", "2", "--client", "3"]
    assert cli(*next_command[1:], "--no-pdb") == 1
    assert "ValueError: no scanner (own_code.py, line" in capsys.readouterr().err
    kept = [path.read_text("utf-8") for path in sorted(Path("run/errors").iterdir())]
    assert [text.count("ValueError: no scanner\n") for text in kept] == [1, 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_failure_may_end_a_run(engine: str, capsys: Capture) -> None:
    settings = "--trainer.engine", engine, "--trainer.on_client_error"
    assert fit("FailsAtTwo", *settings, "raise") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"error: round 1: client 3 failed: ValueError: no scanner", line)
    assert "trainer.on_client_error is raise" in line and "run/errors/round-1.txt" in line
    assert fit("FailsAtTwo", *settings, "continue", "--ckpt_path", "last") == 0


def test_a_resume_forgets_the_tracebacks_of_the_rounds_that_it_repeats() -> None:
    assert fit("FailsAtTwo", "--trainer.keep_rounds", "1") == 0
    for round in (2, 10):
        Path(f"run/errors/round-{round}.txt").write_text("stale\n", "utf-8")
    kept = ("--ckpt_path", "run/checkpoints/round-000001.ckpt")
    assert fit("FailsAtTwo", "--trainer.keep_rounds", "1", *kept) == 0
    texts = [path.read_text("utf-8") for path in sorted(Path("run/errors").iterdir())]
    assert [text.count("Traceback") for text in texts] == [1, 1]


def test_only_tracebacks_that_are_there_are_named(capsys: Capture) -> None:
    faults = ("--trainer.schedule", "Faults", "--trainer.schedule.schedule", "Synchronous")
    assert fit("Net", *faults, "--trainer.schedule.nan", "0.2") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "fits failed)" in line]
    assert "errors" not in line and not Path("run/errors").exists()


def test_debug_prints_the_traceback(capsys: Capture) -> None:
    assert fit("FailsAlways", "--debug") == 1
    said = capsys.readouterr().err
    assert said.count("ValueError: batch of 16\n") == 1 and "in training_step" in said
    assert said.splitlines()[-1].startswith("flsuite: error: round 1: 10 of 10 clients")
    assert logging.getLogger("flsuite").level != logging.DEBUG


def test_the_usual_score_of_a_model_picks_the_round(capsys: Capture) -> None:
    assert fit("Net") == 0
    said = capsys.readouterr()
    assert "val/acc" in said.err and "picked by" not in said.err
    assert read_settings(Path("run"))["monitor"] == "acc"
    assert fit("ScoredByKappa", "--run_dir", "other") == 0
    line = "rounds are picked by loss; also logged: kappa (--trainer.monitor kappa)"
    assert capsys.readouterr().err.count(line) == 1


def test_a_resumed_run_keeps_its_monitor(capsys: Capture) -> None:
    assert fit("Net", "--trainer.monitor", "loss") == 0
    config = Path("run/config.yaml")
    config.write_text(config.read_text("utf-8").replace("monitor: loss", "monitor: null"), "utf-8")
    assert cli("resume", "run", "--trainer.rounds", "3") == 0
    assert read_settings(Path("run"))["monitor"] == "loss"


def test_an_unknown_monitor_is_quoted_as_typed(capsys: Capture) -> None:
    assert fit("Net", "--trainer.monitor", "val/accc") == 2
    assert capsys.readouterr().err.strip().endswith("acc_client_worst, got 'val/accc'")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            own.Net(width=63),
            r"\(own_code.py, line \d+, in Net.forward\); a sample is 1 x 8 x 8, and there are 10 ",
        ),
        (
            own.Net(classes=5),
            "Net.evaluate.; a sample is 1 x 8 x 8, the model returns 5 numbers for it, and there ",
        ),
        (own.WithLogits(classes=5), "the model returns 5 numbers for it, and there"),
        (own.WithLogits(classes=12), "WithLogits has 12 outputs .* 10 classes"),
        (own.FailsInValidation(), r"KeyError: 'a mask' \(own_code.py, line \d+, in FailsInVali"),
    ],
)
def test_what_a_model_cannot_score_is_refused(model: LightningModule, words: str) -> None:
    with pytest.raises(FlsuiteError, match=f"^model: .*{words}"):
        trainer(run_dir="run").fit(model, digits(partition=IID()))
    assert not Path("run").exists()


def test_a_step_that_fails_in_a_run_is_one_line(capsys: Capture) -> None:
    assert fit("FailsWhenTrained", "--trainer.engine", "InProcess") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"KeyError: 'a mask' \(own_code.py, line \d+, in FailsWhenT.*test_step\)", line
    )
    assert line.endswith("round 1 is not done; the traceback is in run/errors/round-1.txt")
    assert "in test_step" in Path("run/errors/round-1.txt").read_text("utf-8")


def test_a_rule_that_raises_is_one_line(capsys: Capture) -> None:
    assert fit("Net", "--trainer.aggregator", f"{OWN}.RaisesInCombine") == 1
    (line,) = capsys.readouterr().err.splitlines()
    cause = r"ValueError: no model \(own_code.py, line \d+, in RaisesInCombine.combine\)"
    assert re.match(rf"flsuite: error: {cause}; round 1 is ", line)


FAULTY: dict[Any, tuple[type[FlsuiteError], str]] = {
    own.NoTerms(): (FlsuiteError, "NoTerms.terms returned None; return"),
    own.NoEncode(): (FlsuiteError, "NoEncode.encode returned None; return a Payload"),
    own.RaisesInEncode(): (
        FederationError,
        r"round 1: 5 of 5 .* no code \(own_code.py, line \d+, in RaisesInEncode.encode\); the ",
    ),
    own.NoDecode(): (FlsuiteError, "NoDecode.decode returned None; return a Payload"),
    own.RaisesInDecode(): (
        FederationError,
        r"round 1: .*\(KeyError: 'no code' \(own_code.py, line \d+, in RaisesInDecode.decode\)",
    ),
    own.NoTemplate(): (FlsuiteError, "NoTemplate.template returned None; return a Payload"),
    own.NoAggregate(): (FederationError, "round 1: NoAggregate returned a faulty state"),
    own.Misspelt(): (FlsuiteError, "Misspelt.gradiant is never called; did you mean gradient?"),
}


@pytest.mark.parametrize("part", FAULTY, ids=lambda part: type(part).__name__)
def test_a_part_with_a_mistake_is_one_line(part: Any) -> None:
    kind, words = FAULTY[part]
    if not isinstance(part, Rule):
        name = "objective" if isinstance(part, Objective) else "transforms"
        part = FedAvg(**{name: part if name == "objective" else [part]})
    with pytest.raises(kind, match=f"^{words}") as error:
        trainer(rounds=1, aggregator=part).fit(own.Net(), digits())
    assert type(error.value) is kind and "\n" not in str(error.value)


_LAYER, _X = nn.Linear(4, 3), torch.ones(2, 4)
_MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a wide sample": (lambda: _LAYER(torch.ones(2, 5)), "as wide as what it receives"),
    "a label out of range": (
        lambda: F.cross_entropy(_X, torch.tensor([0, 7])),
        "correct the label",
    ),
    "a fixed batch": (lambda: _X.reshape(3, 4), "take the size from the batch"),
    "a detached loss": (lambda: _LAYER(_X).sum().detach().backward(), "not loss.item()"),
    "a loss per sample": (lambda: _LAYER(_X).sum(1).backward(), "one loss per batch"),
    "bytes": (lambda: _LAYER(_X.byte()), "x.float()"),
    "bytes of an image": (lambda: nn.Conv1d(2, 1, 1)(_X.byte()), "x.float()"),
    "float labels": (lambda: F.cross_entropy(_X, torch.zeros(2)), "one class per sample"),
    "a column of labels": (lambda: F.cross_entropy(_X, torch.ones(2, 1).long()), "one class per"),
}


@pytest.mark.parametrize(("mistake", "remedy"), _MISTAKES.values(), ids=_MISTAKES)
def test_an_error_of_torch_says_what_to_change(mistake: Callable[[], Any], remedy: str) -> None:
    with pytest.raises((RuntimeError, IndexError)) as error:
        mistake()
    assert remedy in remedy_of(error.value)


@pytest.mark.parametrize("model", ["WithoutSuper", "WithoutSuperOrLayers"])
def test_a_model_without_super_is_told_so(model: str, capsys: Capture) -> None:
    assert fit(model) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "super().__init__() first" in line and f"{model}.__init__" in line


def test_a_method_of_other_weights_refuses_a_model_that_skips_a_batch(capsys: Capture) -> None:
    sharp = ("--trainer.aggregator", "FedAvg", "--trainer.aggregator.objective", f"{OWN}.Sharp")
    assert fit("SkipsBatches", *sharp) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "SkipsBatches returned None; return a loss, or choose another aggregator" in line


def test_a_resume_with_another_rate_names_the_fork(capsys: Capture) -> None:
    assert fit("Net") == 0
    assert cli("resume", "run", "--model.lr", "0.05", "--trainer.gradient_clip_val", "2") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    command = "fork run --at 2 --trainer.gradient_clip_val 2 --model.lr 0.05"
    assert line.endswith(f"or fork it: flsuite {command}")
    assert cli(*command.split(), "--run_dir", "fork", "--trainer.rounds", "3") == 0
    assert cli("resume", "run", "--trainer.aggregator", "FedProx") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    command = line.partition("or fork it: flsuite ")[2]
    assert cli(*command.split(), "--run_dir", "other", "--trainer.rounds", "3") == 0
    assert cli("resume", "run", "--data.clients", "5") == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("or start a new run")


def test_a_run_without_a_config_is_named_as_in_python(capsys: Capture) -> None:
    plain = ("fit", "--model", f"{OWN}.Net", "--data", "Digits", "--data.clients", "3")
    assert cli(*plain, "--trainer.rounds", "1") == 0
    (run,) = Path("runs/digits-fedavg").iterdir()
    assert str(run) in capsys.readouterr().out
