"""Ordinary Lightning callbacks: honored in every fit, on every engine, or refused."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)

from flsuite.callbacks import FederationCallback
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import clone
from flsuite.data import IID
from flsuite.data.loader import TrainLoader
from flsuite.federation import ClientProfiler, InProcess, Processes, Vectorized
from flsuite.models import MLP, Classifier
from tests.conftest import classifier, digits, equal_states, mostly_long, trainer


class LastBatchCounts(Callback):
    """Drops the gradient of every batch but the last one of an epoch."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if not trainer.is_last_batch:
            for parameter in pl_module.parameters():
                parameter.grad = None


def _drop_gradients(trainer: Trainer, module: LightningModule, *args: Any) -> None:
    for parameter in list(module.parameters())[:1]:
        parameter.grad = None


STOCK = {
    "accumulation": lambda: GradientAccumulationScheduler({0: 4, 1: 1}),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "lambda": lambda: LambdaCallback(on_before_optimizer_step=_drop_gradients),
    "is_last_batch": LastBatchCounts,
}


def model() -> Classifier:
    return Classifier(MLP(hidden=(16,)), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def state(engine: Any, *callbacks: Callback, rounds: int = 2) -> dict[str, torch.Tensor]:
    made = trainer(rounds=rounds, engine=engine, max_epochs=3, callbacks=list(callbacks))
    made.fit(model(), digits(clients=3, partition=IID(), val_fraction=0.0))
    return made.federation.state


@pytest.mark.parametrize("make", mostly_long(STOCK, "swa"))
def test_every_fit_honours_it_on_every_engine(make: Any) -> None:
    ours, theirs = state(InProcess(), make()), state(Processes(workers=2), make())
    assert equal_states(ours, theirs)
    assert not equal_states(ours, state(InProcess()))


@pytest.mark.parametrize("name", STOCK)
def test_every_client_ends_where_a_plain_lightning_trainer_takes_it(name: str) -> None:
    """Each of three clients sends the result of an ordinary fit on the same batches."""
    torch.set_num_threads(1)  # like the engine: two threads add in another order

    class Watch(FederationCallback):
        def __init__(self) -> None:
            self.start: dict[str, torch.Tensor] = {}
            self.sent: list[dict[str, torch.Tensor]] = []

        def on_federation_start(self, run: Any) -> None:
            self.start = clone(run.evaluator.model.state_dict())

        def on_client_end(self, run: Any, outcome: Any) -> None:
            self.sent.append(outcome.update.state)

    watch, data = Watch(), digits(clients=3, partition=IID(), val_fraction=0.0)
    made = trainer(rounds=1, max_epochs=3, callbacks=[STOCK[name](), watch])
    made.fit(model(), data)
    assert made.run is not None and len(watch.sent) == 3

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for client, sent in enumerate(watch.sent):
        plain = model()
        plain.ensure_built(data.spec)
        plain.load_state_dict(watch.start)
        lightning = Trainer(max_epochs=3, accelerator="cpu", callbacks=[STOCK[name]()], **quiet)
        lightning.fit(plain, TrainLoader(data.federated, client, made.run.options.seed, 1))
        assert equal_states(sent, dict(plain.state_dict()))


def test_early_stopping_on_a_metric_that_the_model_logs_stops_each_client() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("fit_loss", loss, on_epoch=True, on_step=False)
            return loss

    def steps(engine: Any) -> list[int]:
        stop = EarlyStopping("fit_loss", patience=1, min_delta=10.0, check_on_train_epoch_end=True)
        made = trainer(rounds=2, max_epochs=5, engine=engine, callbacks=[stop])
        made.fit(Logs(MLP(hidden=(4,))), digits(clients=3, partition=IID(), val_fraction=0.0))
        return [update.steps for update in made.federation.log.updates]

    here = steps(InProcess())
    assert here == steps(Processes(workers=2))
    run = trainer().prepare(classifier(), digits(clients=3))
    batches = len(TrainLoader(run.federation.data, 0, 3, 1))
    assert all(count < 5 * batches for count in here)


@pytest.mark.parametrize("score", ["val_loss", "test/acc", "accuracy", "f1_macro"])
def test_early_stopping_on_a_score_of_the_rounds_is_refused_before_round_1(score: str) -> None:
    with pytest.raises(FlsuiteError, match=f"EarlyStopping waits for {score}.*RoundEarlyStopping"):
        trainer(callbacks=[EarlyStopping(score)])
    trainer(callbacks=[EarlyStopping(score, strict=False), EarlyStopping("fit_loss_epoch")])


class Anneals(FederationCallback):
    """Shrinks gradients by a number that its federation hooks change from round to round."""

    def __init__(self) -> None:
        self.rounds = 0
        self.clients = 0

    def on_round_start(self, run: Any, round: int, clients: Any) -> None:
        self.rounds += 1

    def on_client_end(self, run: Any, outcome: Any) -> None:
        self.clients += 1  # changes while other clients of the round have yet to train

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.mul_(1 / (1 + self.rounds + 10 * self.clients))


def test_clients_see_a_callbacks_state_of_the_start_of_their_round() -> None:
    """By hand: in round n every gradient is divided by ``1 + n + 10 * 3 (n - 1)``."""

    class ByHand(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
            n = trainer.train_dataloader.round  # type: ignore[union-attr]
            for parameter in module.parameters():
                parameter.grad.mul_(1 / (1 + n + 30 * (n - 1)))

    ours, theirs = state(InProcess(), Anneals()), state(Processes(workers=2), Anneals())
    assert equal_states(ours, theirs)
    assert equal_states(ours, state(InProcess(), ByHand()))


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (ModelCheckpoint, "last.ckpt"),
        (partial(EarlyStopping, "val_loss"), "RoundEarlyStopping"),
    ],
)
def test_what_belongs_to_a_single_fit_is_refused(callback: Any, instead: str) -> None:
    name = type(callback()).__name__
    with pytest.raises(FlsuiteError, match=rf"trainer\.callbacks: {name}.*{instead}"):
        trainer(callbacks=[callback()])


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (TQDMProgressBar, "RoundProgress shows"),
        (RichProgressBar, "RoundProgress shows"),
        (LearningRateMonitor, "trainer.lr_decay logs lr_factor"),
    ],
)
def test_what_has_a_stand_in_is_left_out_with_a_line(
    callback: Any, instead: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="flsuite"):
        made = trainer(callbacks=[callback()])
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"trainer.callbacks: {callback.__name__} is left out: ")
    assert instead in line
    assert not any(isinstance(one, callback) for one in made.callbacks)


def test_a_profile_sums_the_steps_of_clients_and_changes_no_weight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fitted(profiler: Any, engine: Any) -> Any:
        made = trainer(rounds=2, engine=engine, profiler=profiler)
        made.fit(classifier(), digits(3))
        return made

    plain = fitted(None, InProcess())
    assert not plain.run.profile and "seconds in the fits" not in capsys.readouterr().out
    whole, one = fitted("simple", InProcess()), fitted(ClientProfiler(1), Processes(workers=2))
    steps = [row for row in plain.run.folder.table.rows if row[7] == "steps"]
    by_client = {row[5]: sum(r[8] for r in steps if r[5] == row[5]) for row in steps}
    name = "[Strategy]SingleDeviceStrategy.training_step"
    assert whole.run.profile[name][0] == by_client["global"]
    assert one.run.profile[name][0] == by_client["1"] < by_client["global"]
    assert all(seconds > 0 for _, seconds in whole.run.profile.values())
    for profiled in (whole, one):
        assert equal_states(profiled.federation.state, plain.federation.state)
        assert profiled.run.settings == plain.run.settings
    assert capsys.readouterr().out.count("seconds in the fits of clients") == 2


def test_a_profile_of_a_stranger_or_of_stacks_is_refused() -> None:
    for profiler, engine, words in (
        (ClientProfiler(9), InProcess(), "there is no client 9; there are 0 to 2"),
        ("simple", Vectorized(), "trainer.profiler is ClientProfiler; set trainer.engine"),
    ):
        made = trainer(profiler=profiler, engine=engine)
        with pytest.raises(FlsuiteError, match=words):
            made.fit(classifier(), digits(3))
