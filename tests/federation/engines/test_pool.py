"""Workers that die while sending, and clients that hang."""

import logging
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from flsuite.callbacks import FederationCallback
from flsuite.common.messages import ClientResult
from flsuite.federation import Processes
from flsuite.models import MLP, Classifier
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.absent import state_without_client_1
from tests.federation.engines.sabotage import Sabotage


def fit(tmp_path: Path, how: str, times: int = 1, **engine: Any) -> Any:
    callback = Sabotage(how, tmp_path, times)
    made = trainer(rounds=3, engine=Processes(workers=2, **engine), callbacks=[callback])
    made.fit(classifier(), digits())
    return made


@pytest.fixture(scope="module")
def whole() -> Any:
    """Return the state of a run without a mishap."""
    torch.set_num_threads(1)
    made = trainer(rounds=3)
    made.fit(classifier(), digits())
    return made.federation.state


@pytest.mark.parametrize("how", ["dies", "garbage", "a stranger", "cut"])
def test_a_worker_killed_while_it_sends_is_replaced_and_its_client_retried(
    how: str, whole: Any, tmp_path: Path
) -> None:
    made = fit(tmp_path, how)
    assert len(list(tmp_path.iterdir())) == 1, "it has happened"
    assert equal_states(made.federation.state, whole)


def test_a_client_whose_worker_dies_twice_while_it_sends_has_failed(tmp_path: Path) -> None:
    made = fit(tmp_path, "dies", times=2)
    assert equal_states(made.federation.state, state_without_client_1())


@pytest.mark.parametrize("how", ["hangs", "hangs while it sends"])
def test_a_client_that_hangs_has_failed_and_the_run_goes_on(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        made = fit(tmp_path, how, timeout=3.0)
    assert time.monotonic() - began < 60
    assert equal_states(made.federation.state, state_without_client_1())
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "round 2: client 1 failed: it did not finish" in said


class LeavesNoRoom(FederationCallback):
    """Limits the size of files, also of those in memory, before round 2."""

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        if round == 2:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))


def test_a_job_that_cannot_be_sent_for_want_of_room_ends_the_run() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    made = trainer(rounds=2, engine=Processes(workers=1), callbacks=[LeavesNoRoom()])
    model = Classifier(MLP((1200,)))  # 300 kB of weights in one layer
    try:
        with pytest.raises(OSError, match="too large"):
            made.fit(model, digits(clients=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert made.round == 1


class KillsAndDies(FederationCallback):
    """Kills the one worker before it reads the job of client 1, whose fit then dies once.

    Args:
        is_idle: Whether the worker dies before the job is sent to it.
        engine: The engine.
        folder: Where the fit records its death.
    """

    def __init__(self, is_idle: bool, engine: Processes, folder: Path) -> None:
        self.is_idle, self.engine, self.folder = is_idle, engine, folder

    def __deepcopy__(self, memo: Any) -> "KillsAndDies":
        return KillsAndDies(self.is_idle, None, self.folder)  # type: ignore[arg-type]

    def on_client_end(self, run: Any, outcome: Any) -> None:
        if not isinstance(outcome, ClientResult) or outcome.update.client != 0:
            return
        pid = self.engine._pool[0].process.pid
        # A stopped process cannot read.
        os.kill(pid, signal.SIGKILL if self.is_idle else signal.SIGSTOP)
        if not self.is_idle:
            threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        if loader.client == 1 and not (self.folder / "done").exists():
            (self.folder / "done").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_worker_killed_between_two_clients_leaves_the_next_one_its_retry(
    is_idle: bool, tmp_path: Path
) -> None:
    engine = Processes(workers=1)
    made = trainer(rounds=1, engine=engine, callbacks=[KillsAndDies(is_idle, engine, tmp_path)])
    made.fit(classifier(), digits(clients=3))
    assert (tmp_path / "done").exists()
    assert not made.federation.log.failures
