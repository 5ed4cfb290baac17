"""``flsuite debug``: a client's fit again, bit for bit, with its steps and the batch at fault."""

import copy
import io
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.commands.debug import _FitWatch, _norm, _ranges, replayed
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientResult, Outcome
from flsuite.common.state import State, clone
from flsuite.data import Digits, FromDataset
from flsuite.federation import Processes
from flsuite.runs.record import kept_rounds, rows_of
from flsuite.runs.run import Run
from tests.commands.command import QUICKSTART, Capture, cli, refused
from tests.conftest import equal_states, long, trainer
from tests.plain import Net, blobs

OWN = """
import bdb

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, stops: str = ""):
        super().__init__()
        self.stops = stops
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        if self.stops == "quit":
            raise bdb.BdbQuit
        if self.stops == "here":
            breakpoint()
        x, y = batch
        if self.stops.startswith("masks"):
            x = x.nan_to_num()
        if self.stops == "masks, then raises" and batch_idx == 6:
            x.reshape(4, 4)
        return F.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    clients = 4

    def __init__(self, bug: str = ""):
        super().__init__()
        self.bug = bug

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(120, 4, generator=generator), torch.arange(120) % 3
        if self.bug == "nan":
            x[57, 2] = float("nan")
        if self.bug == "label":
            y[57] = 7
        return DataLoader(TensorDataset(x, y), batch_size=4)
"""
HALF = ("--trainer.schedule", "Synchronous", "--trainer.schedule.participation", "0.5")
FAST = ("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false")


class Kept(FederationCallback):
    """Keeps what the server takes of each client, and its memory."""

    affects: ClassVar[Affects] = "nothing"
    fits: ClassVar[dict[tuple[int, int], tuple[State, Any]]] = {}

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        assert isinstance(outcome, ClientResult)
        update = outcome.update
        kept = clone(update.state), copy.deepcopy(outcome.memory.get("objective", {}))
        self.fits.setdefault((update.round, update.client), kept)


@pytest.mark.parametrize("method", ["SCAFFOLD", "Ditto", *long("FedAvg")])
def test_a_fit_again_ends_with_the_weights_of_the_run(method: str, capsys: Capture) -> None:
    Kept.fits.clear()
    short = ("--data.train_samples", "200", "--data.clients", "3", "--trainer.rounds", "2")
    names = ("--trainer.aggregator", method, "--trainer.callbacks+", f"{__name__}.Kept")
    assert cli("fit", "--config", QUICKSTART, "--run_dir", "run", *short, *names, *FAST) == 0
    with replayed(Path("run"), 2, 1) as replay:
        watch = _FitWatch()
        outcome = replay.fit(watch)
        again = replay.fit(_FitWatch())  # as the debugger does
    for one in (outcome, again):
        assert isinstance(one, ClientResult)
        state, memory = Kept.fits[2, 1]
        assert equal_states(one.update.state, state)
        assert torch.equal(*map(_flat, (one.memory.get("objective", {}), memory)))
        assert method == "FedAvg" or len(_flat(memory)) > 0, "the method has a state"
    assert len(watch.steps) == outcome.update.steps and watch.fault is None

    assert cli("debug", "run", "--at", "2", "--client", "1") == 0
    out = capsys.readouterr().out
    assert f"the loss of the fit is that of the record: {outcome.update.metrics['loss']:.9g}" in out


def _flat(memory: Any) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(memory)
    return torch.cat(
        [torch.as_tensor(leaf).float().flatten() for leaf in leaves] or [torch.ones(0)]
    )


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own file, which is imported again."""
    Path("own.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own", raising=False)


def own_run(bug: str = "", stops: str = "", *more: str) -> int:
    own = ("--model", "own.Net", "--data", "own.Data", "--data.bug", bug, "--model.stops", stops)
    return cli("fit", *own, "--trainer.rounds", "3", "--run_dir", "run", *FAST, *more)


def failed_client() -> str:
    rows = rows_of(Path("run/timeline.csv"))
    (client,) = {row["client"] for row in rows if row["outcome"] == "failed"}
    return client


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what answers the prompts of the debugger."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


FAULTS = {
    "nan": "batch[0] is not finite in sample 57",
    "label": "IndexError: Target 7 is out of bounds. (own.py, line 27, in ",
}


@pytest.mark.parametrize("bug", FAULTS)
def test_the_batch_at_fault_is_named_and_the_debugger_stops_there(
    bug: str, capsys: Capture, typed: Any
) -> None:
    assert own_run(bug) == 0
    client = failed_client()
    where = ("debug", "run", "--at", "3", "--client", client)
    capsys.readouterr()
    assert cli(*where, "--no-pdb") == 1
    captured = capsys.readouterr()
    (error,) = [line for line in captured.err.splitlines() if line.startswith("flsuite: error")]
    assert f"round 3: client {client}: step " in error and FAULTS[bug] in error
    assert bug == "nan" or "correct the label" in error
    assert bug == "nan" or "batch[1] is from 0 (sample 96) to 7 (sample 57)" in error
    samples = error.rpartition("its samples: ")[2].split(", ")
    assert samples == ["96", "57", "37"], "the last batch of the epoch"
    assert captured.out.count("at fault") == 1 and "round 2 was not kept" in captured.err
    assert 2 in kept_rounds(Path("run")), "the next time is faster"

    words = {"nan": "p batch[0].isnan().sum()\nq\n", "label": "u\np batch_idx, y.max()\nq\n"}
    typed(words[bug])
    assert cli(*where) == 1
    out = capsys.readouterr().out
    assert {"nan": "tensor(1)", "label": ", tensor(7))"}[bug] in out
    assert ("own.py(18)training_step()" if bug == "nan" else "own.py(27)training_step()") in out


def test_the_end_of_a_run_names_a_fit_that_failed_in_an_earlier_round(capsys: Capture) -> None:
    shown = "--trainer.enable_progress_bar", "true"
    assert own_run("label", "", *HALF, "--seed_everything", "2", *shown) == 0
    rows = rows_of(Path("run/timeline.csv"))
    *_, last = (row for row in rows if row["outcome"] == "failed")
    assert last["version"] != "2", "not in the last round"
    words = f"flsuite debug run --at {int(last['version']) + 1} --client {last['client']} "
    assert words in capsys.readouterr().out


def test_a_step_is_run_in_the_debugger_on_request(capsys: Capture, typed: Any) -> None:
    assert own_run() == 0
    typed("p batch_idx\nc\n")
    assert cli("debug", "run", "--at", "1", "--client", "0", "--step", "3") == 0
    out = capsys.readouterr().out
    assert "(Pdb) 2\n" in out and "27 samples, classes 0: 7, 1: 10, 2: 10" in out


def test_a_round_or_client_that_is_not_there_is_one_line(capsys: Capture) -> None:
    assert own_run("", "", *HALF) == 0
    line = refused(capsys, "debug", "run", "--at", "4", "--client", "0")
    assert "--at must be from 1 to 3, the rounds of run" in line
    assert "client 9 did not begin a fit in round 1; --client may be" in refused(
        capsys, "debug", "run", "--at", "1", "--client", "9"
    )
    (client, *_) = (row["client"] for row in rows_of(Path("run/timeline.csv")))
    line = refused(capsys, "debug", "run", "--at", "1", "--client", client, "--step", "50")
    assert "the fit has 7 steps, got --step 50" in line


def test_what_was_not_trained_is_refused_before_rounds_are_replayed(capsys: Capture) -> None:
    assert own_run("", "", *HALF) == 0
    rows = [row for row in rows_of(Path("run/timeline.csv")) if row["version"] == "1"]
    (absent, *_) = {*"0123"} - {row["client"] for row in rows}
    line = refused(capsys, "debug", "run", "--at", "2", "--client", absent)
    assert f"client {absent} did not begin a fit in round 2; --client may be" in line
    there = rows[0]["client"]
    line = refused(capsys, "debug", "run", "--at", "2", "--client", there, "--step", "0")
    assert "--step must be at least 1, got 0" in line


def debugged(capsys: Capture, *where: str) -> tuple[int, str, str]:
    """Return the exit status, the output, and the error of a fit."""
    capsys.readouterr()
    status = cli("debug", *where, "--no-pdb")
    captured = capsys.readouterr()
    return status, captured.out, captured.err.splitlines()[-1] if status else ""


@pytest.mark.parametrize("then", ["", ", then raises"])
def test_a_number_that_the_model_masks_is_a_note(then: str, capsys: Capture) -> None:
    assert own_run("nan", f"masks{then}", "--trainer.max_epochs", "2") == (1 if then else 0)
    status, out, error = debugged(capsys, "run", "--at", "1", "--client", "3")
    assert status == (1 if then else 0) and "batch[0] is not finite" in out
    assert out.count("at fault") == bool(then)
    if then:
        assert "step 7, batch 7 of epoch 1, is at fault: RuntimeError: shape '[4, 4]' is" in error
        assert "take the size from the batch" in error and "is not finite" not in error
    else:
        assert out.count(" 2 │     7 ") == 1, "the second epoch"


def test_without_rounds_the_fit_that_failed_is_found(capsys: Capture) -> None:
    settings = [f"--trainer.schedule.{name}" for name in ("concurrency", "buffer_size")]
    several = (settings[0], "3", settings[1], "3")
    assert own_run("label", "", "--trainer.schedule", "Asynchronous", *several) == 0
    rows = [row for row in rows_of(Path("run/timeline.csv")) if row["version"] == "1"]
    row = next(row for row in rows if row["outcome"] == "failed")
    first = min(float(row["started_s"]) for row in rows)
    assert float(row["started_s"]) > first, "it begins when another one has come back"
    status, _, error = debugged(capsys, "run", "--at", "2", "--client", row["client"])
    assert status == 1 and "Target 7 is out of bounds" in error


def test_the_first_round_of_a_fork_begins_at_the_parent(capsys: Capture) -> None:
    assert own_run("", "", "--trainer.keep_rounds", "1") == 0
    assert cli("fork", "run", "--at", "2", "--run_dir", "fork") == 0
    status, out, _ = debugged(capsys, "fork", "--at", "3", "--client", "1")
    assert status == 0 and "the loss of the fit is that of the record" in out
    assert debugged(capsys, "fork", "--at", "1", "--client", "1")[0] == 2


def test_a_fault_that_the_schedule_injects_is_left_out(capsys: Capture) -> None:
    faults = ("--trainer.schedule", "Faults", "--trainer.schedule.schedule", "Synchronous")
    assert own_run("", "", *faults, "--trainer.schedule.raises", "0.3") == 0
    rows = rows_of(Path("run/timeline.csv"))
    row = next(row for row in rows if row["outcome"] == "failed")
    at = str(int(row["version"]) + 1)
    status, out, _ = debugged(capsys, "run", "--at", at, "--client", row["client"])
    assert status == 0 and "injects the fault raises into the fit" in out


class Batches(_FitWatch):
    """Keeps the targets of the batches."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, index)
        self.targets = [*getattr(self, "targets", []), batch[1]]


POOLED = ("--trainer.aggregator", "Centralized", "--data.augment", "CropFlip")


@pytest.mark.parametrize("more", [(), POOLED])
def test_samples_have_the_numbers_of_the_data_set(more: tuple[str, ...]) -> None:
    few = ("--data.train_samples", "200", "--data.clients", "4", "--trainer.rounds", "1")
    assert cli("fit", "--config", QUICKSTART, "--run_dir", "run", *few, *FAST, *more) == 0
    labels = Digits(clients=4).load().train.y
    with replayed(Path("run"), 1, -1 if more else 1) as replay:
        watch = Batches()
        replay.fit(watch)
    for step, targets in zip(watch.steps, watch.targets, strict=True):
        assert torch.equal(labels[step.samples], targets)


def test_the_loss_of_a_step_is_that_of_its_batch() -> None:
    assert own_run("", "", "--trainer.accumulate_grad_batches", "2") == 0
    with replayed(Path("run"), 1, 1) as replay:
        watch = _FitWatch()
        outcome = replay.fit(watch)
    assert isinstance(outcome, ClientResult)
    losses = [step.loss or 0.0 for step in watch.steps]
    assert sum(losses) / len(losses) == pytest.approx(outcome.update.metrics["loss"])


def test_a_step_that_waits_is_named_with_its_samples(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_run() == 0
    loss, losses = torch.nn.functional.cross_entropy, count()

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.3 * (next(losses) == 4))
        return loss(*args)

    monkeypatch.setattr("flsuite.commands.debug._SLOW", 0.2)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", slow)
    assert cli("debug", "run", "--at", "1", "--client", "1", "--no-pdb") == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out.splitlines() if " slow" in line]
    assert f"step {row[0]} takes 0.3 seconds with the reading of its batch, much longer" in out


def test_a_sample_with_the_largest_number_is_named() -> None:
    batch = torch.tensor([[0.5, -2.0], [1e9, 0.0]]), torch.tensor([3, 1])
    ranges = (
        "batch[0] is from -2 (sample 8) to 1e+09 (sample 6), batch[1] is from 1 (sample 6) to 3"
    )
    assert _ranges(batch, [8, 6]) == f"{ranges} (sample 8)"


def test_a_large_or_sparse_gradient_is_finite() -> None:
    large = torch.full((4,), 1e30)
    assert _norm(large) == pytest.approx(2e30)
    assert _norm(large.to_sparse()) == pytest.approx(2e30)


def test_who_leaves_the_debugger_ends_the_run(capsys: Capture) -> None:
    assert own_run("", "quit") == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("flsuite: error: interrupted in the debugger; flsuite resume run")


class Stops(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        breakpoint()
        return super().training_step(batch, batch_idx)


def test_a_breakpoint_in_a_worker_names_the_engine_that_can_stop() -> None:
    data = FromDataset(blobs(20, 0), blobs(20, 1), clients=2)
    with pytest.raises(FlsuiteError, match=r"at a breakpoint; use --trainer\.engine InProcess"):
        trainer(rounds=1, engine=Processes(workers=2)).fit(Stops(), data)
