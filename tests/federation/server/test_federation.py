"""A failing client is lost for the round, and nothing else."""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from flsuite.aggregators import Mean
from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientFailure
from flsuite.data import DataSpec, DataSplit, FederatedDataModule, Natural, PublishedSplits
from flsuite.federation import InProcess, Processes
from flsuite.models import Classifier, ResNet20
from tests.conftest import classifier, digits, equal_states, trainer
from tests.federation.absent import state_without_client_1


class Breaks(Callback):
    """Breaks the fits of some clients in some rounds."""

    affects = "nothing"  # a run is resumed without it

    def __init__(self, how: str, clients: tuple[int, ...] = (1,), round: int = 2) -> None:
        self.how, self.clients, self.round = how, clients, round

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader: Any = trainer.train_dataloader
        if loader.client not in self.clients or loader.round != self.round:
            return
        if self.how == "raise":
            raise RuntimeError("the scanner is on fire")
        if self.how == "nan":
            next(pl_module.parameters()).data[0] = float("nan")
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)


class Recorder(FederationCallback):
    def __init__(self) -> None:
        self.failures: list[ClientFailure] = []

    def on_client_end(self, run: Any, outcome: Any) -> None:
        if isinstance(outcome, ClientFailure):
            self.failures.append(outcome)


@pytest.mark.parametrize(
    ("how", "engine", "reason"),
    [
        ("raise", Processes(workers=1), "RuntimeError: the scanner is on fire"),
        ("nan", InProcess(), "not finite"),
        ("die", Processes(workers=2), "died twice"),
    ],
    ids=["raises", "nan", "worker_dies"],
)
def test_the_round_goes_on_without_a_failed_client(
    how: str, engine: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    failing = trainer(rounds=3, engine=engine, callbacks=[Breaks(how), recorder])
    with caplog.at_level(logging.WARNING, logger="flsuite"):
        failing.fit(classifier(), digits())
    (failure,) = recorder.failures
    assert (failure.client, failure.round) == (1, 2) and reason in failure.reason
    (line,) = (r.message for r in caplog.records if "round 2: client 1 failed" in r.message)
    assert reason in line
    assert equal_states(failing.federation.state, state_without_client_1())
    failed = [row for row in failing.run.folder.table.rows if row[7] == "failed" and row[8] > 0]
    assert [(row[0], row[8]) for row in failed] == [(2, 1.0)]


def test_all_clients_failing_keeps_the_last_good_state(tmp_path: Path) -> None:
    broken = trainer(rounds=4, run_dir=tmp_path, callbacks=[Breaks("raise", (0, 1, 2, 3, 4), 3)])
    with pytest.raises(FederationError, match="round 3: 5 of 5 clients failed alike: Run"):
        broken.fit(classifier(), digits())
    good = trainer(rounds=2)
    good.fit(classifier(), digits())
    again = trainer(rounds=4, run_dir=tmp_path)
    assert again.test(classifier(), digits(), ckpt_path="last") and again.round == 2
    assert equal_states(again.federation.state, good.federation.state)
    again.fit(classifier(), digits(), ckpt_path="last")
    assert again.round == 4


def test_an_aggregator_that_diverges_is_named() -> None:
    class Explodes(Mean):
        def result(self, *args: Any) -> Any:
            return {k: v * float("inf") for k, v in super().result(*args).items()}

    with pytest.raises(FederationError, match="round 1: Explodes returned a faulty state"):
        trainer(rounds=1, aggregator=Explodes()).fit(classifier(), digits())


class TinyImages(FederatedDataModule):
    """A few colored images with very uneven clients: sizes 1, 2, 5 and 9, batches of 4."""

    def load(self) -> PublishedSplits:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (17, 8, 8, 3), generator=generator, dtype=torch.uint8)
        y = torch.tensor([0] * 8 + [1] * 9)
        owners = torch.tensor([0] + [1] * 2 + [2] * 5 + [3] * 9)
        return PublishedSplits(DataSpec((3, 8, 8), 3), DataSplit(x, y, owners), DataSplit(x, y))


def test_one_sample_an_absent_class_and_a_last_batch_of_one_all_train() -> None:
    recorder = Recorder()
    module = TinyImages(clients=4, partition=Natural(), batch_size=4, val_fraction=0.0)
    made = trainer(rounds=2, callbacks=[recorder])
    made.fit(Classifier(ResNet20(width=2)), module)
    sizes = sorted(made.federation.data.samples(c) for c in range(4))
    assert sizes == [1, 2, 5, 9] and not recorder.failures
    steps = {u.samples: u.steps for u in made.federation.log.updates}
    assert steps == {1: 1, 2: 1, 5: 1, 9: 2}, "a last batch of one joins its neighbour"


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(FlsuiteError, match=r"model must be a .*LightningModule, got Linear"):
        trainer().fit(nn.Linear(2, 2), digits())  # type: ignore[arg-type]
    model = classifier()
    model.ensure_built(DataSpec((1, 28, 28), 10))
    with pytest.raises(FlsuiteError, match="built for multiclass data of shape"):
        trainer().fit(model, digits())


def test_a_clients_model_has_the_servers_running_statistics() -> None:
    made = trainer(rounds=1)
    made.fit(Classifier(ResNet20(width=2)), digits(clients=2))
    federation = made.federation
    means = [name for name in federation.state if name.endswith("running_mean")]
    assert not any(torch.equal(federation.state[n], federation.initial[n]) for n in means)
    for client in (None, 0):
        whole = federation.client_state(client)
        assert equal_states({name: whole[name] for name in federation.state}, federation.state)
