"""The trainer's promises that no other file tests: mistakes are named early, fits start alike."""

import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from flsuite.callbacks import FederationCallback, GradientDissimilarity
from flsuite.commands.main import main
from flsuite.common.errors import FlsuiteError
from flsuite.data import IID
from flsuite.data.loader import TrainLoader
from flsuite.federation import InProcess, Processes
from flsuite.models import MLP, Classifier, FusedSpaceFed, NFClassifier
from tests.conftest import classifier, digits, equal_states, trainer

CONFIG = str(Path(__file__).parents[1] / "configs" / "quickstart.yaml")


# Settings that can only be a mistake


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.limit_train_batches", "0"], "limit_train_batches must be positive, got 0"),
        (["--model.optimizer.lr", "-1"], "client 0 failed before its first step.*Invalid learning"),
        (["--trainer.engine", "Processes", "--model.optimizer.lr", "-1"], "Invalid learning rate"),
    ],
)
def test_a_mistake_is_one_line_with_status_2_and_leaves_nothing(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", CONFIG, "--trainer.rounds", "2", *arguments])
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert done.value.code == 2
    assert re.search(words, lines[-1])
    assert lines[-1].startswith("flsuite: error: ") and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"limit_train_batches": -0.5}, "limit_train_batches must be positive"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"max_steps": -5}, "max_steps must be at least 1, got -5"),
        ({"gradient_clip_val": -1}, "gradient_clip_val must be at least 0, got -1"),
        ({"batchnorm": "mean"}, "batchnorm"),
        ({"score_clients": 0}, "score_clients must be at least 1"),
        ({"round": 3}, "no argument 'round'; did you mean rounds"),
        ({"aggregator": "FedAvg"}, "aggregator must be a .*Aggregator or a .*Rule, got 'FedAvg'"),
        ({"engine": Processes}, "engine must be a .*EngineChoice, got <class"),
        # What a federation cannot honour
        ({"precision": "bf16-true"}, "bf16-mixed"),
        ({"precision": "16-true"}, "16-mixed"),
        ({"max_time": "00:00:01:00"}, "max_time"),
        ({"enable_model_summary": True}, "enable_model_summary has no effect"),
        ({"profiler": "advanced"}, "profiler must be simple.*ClientProfiler.*got 'advanced'"),
        ({"num_nodes": 2}, "num_nodes must be 1"),
        ({"strategy": "ddp"}, "strategy must be auto"),
        ({"limit_test_batches": 1}, "limit_test_batches has no effect.*data.test_samples"),
        ({"limit_val_batches": 0.5}, "limit_val_batches has no effect.*data.test_samples"),
        ({"check_val_every_n_epoch": 5}, "check_val_every_n_epoch.*trainer.evaluate_every"),
    ],
)
def test_a_wrong_argument_is_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(FlsuiteError, match=words) as error:
        trainer(**wrong)
    assert "\n" not in str(error.value)


def test_a_loggers_files_in_a_new_folder_go_with_it(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            raise RuntimeError("no scanner")

    folder = tmp_path / "runs" / "mine"
    logger = CSVLogger(folder, name="", version="log")
    made = trainer(rounds=1, run_dir=folder, callbacks=[Fails()], logger=logger)
    with pytest.raises(FlsuiteError, match=r"no client can train: client 0 .* no scanner"):
        made.fit(classifier(), digits())
    assert list(tmp_path.iterdir()) == []


# The end of a run


class Ends(CSVLogger):
    """Keeps the status that it was finalized with."""

    status = ""

    def finalize(self, status: str) -> None:
        self.status = status


@pytest.mark.parametrize("fails", [True, False])
def test_loggers_are_told_how_the_run_ended(fails: bool, tmp_path: Path) -> None:
    class Breaks(FederationCallback):
        def on_round_end(self, run: Any, round: int) -> None:
            if fails:
                raise RuntimeError("broken")

    logger = Ends(tmp_path)
    made = trainer(rounds=2, logger=logger, callbacks=[Breaks()])
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        made.fit(classifier(), digits())
    assert logger.status == ("failed" if fails else "success")


def test_a_model_ends_with_the_global_weights_and_a_second_fit_says_that_it_starts_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    states = []
    for engine in (InProcess(), Processes(workers=2)):
        model = classifier()
        first = trainer(rounds=1, engine=engine)
        with caplog.at_level(logging.WARNING, logger="flsuite"):
            first.fit(model, digits())
            assert not caplog.records
            assert equal_states(dict(model.state_dict()), first.federation.state)
            second = trainer(rounds=1, engine=engine)
            second.fit(model, digits())
        assert "starts from its weights" in caplog.records[-1].getMessage()
        caplog.clear()
        states.append(second.federation.state)
    assert equal_states(*states), "from the global weights of the first fit, on every engine"
    fresh = trainer(rounds=1)
    fresh.fit(classifier(), digits())
    assert not equal_states(states[0], fresh.federation.state)


# What clients report


@pytest.mark.parametrize("engine", [InProcess(), Processes(workers=1)], ids=["in_process", "one"])
def test_the_loss_of_a_warm_up_is_a_number_of_its_own(engine: Any) -> None:
    """Reference: the mean of the losses of the epochs asked for, and of the warm-up's."""

    class Losses(Callback):
        seen: list[tuple[int, float]] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            Losses.seen.append((trainer.current_epoch, float(outputs["loss"])))

    Losses.seen = []
    made = trainer(rounds=1, max_epochs=2, engine=engine, callbacks=[Losses()])
    model = FusedSpaceFed(warmup_epochs=2, latent_dim=4)
    made.fit(
        model, digits(clients=1, partition=IID(), standardize=False, resize=8, train_samples=64)
    )
    rows = {row[7]: row[8] for row in made.run.folder.table.rows if row[5:7] == ("0", "train")}
    if isinstance(engine, InProcess):
        for name, epochs in (("warmup_loss", (0, 1)), ("loss", (2, 3))):
            losses = [loss for epoch, loss in Losses.seen if epoch in epochs]
            assert rows[name] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert rows["warmup_loss"] < rows["loss"], "a reconstruction error, and a cross-entropy on it"


# Optimizers that live on


class Scheduled(Classifier):
    """Halves its rate after the first epoch of every fit."""

    def __init__(self) -> None:
        super().__init__(MLP(hidden=(8,)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def test_a_schedule_inside_the_model_starts_again_in_every_round() -> None:
    class Rates(Callback):
        seen: list[tuple[int, int, float]] = []
        affects = "nothing"

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            Rates.seen.append((trainer.train_dataloader.round, trainer.current_epoch, rate))

    Rates.seen = []
    made = trainer(rounds=3, max_epochs=2, keep_optimizers=True, callbacks=[Rates()])
    made.fit(Scheduled(), digits(clients=1, partition=IID()))
    expected = [(round, epoch, 0.1 * 0.5**epoch) for round in (1, 2, 3) for epoch in (0, 1)]
    assert Rates.seen == expected


def test_kept_optimizers_carry_their_momentum_over() -> None:
    def state(keep: bool) -> dict[str, torch.Tensor]:
        made = trainer(rounds=2, keep_optimizers=keep)
        model = Classifier(MLP(hidden=(8,)), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        made.fit(model, digits(clients=1, partition=IID()))
        return made.federation.state

    def by_hand() -> dict[str, torch.Tensor]:
        """One client is one optimizer that goes on through both rounds."""
        data = digits(clients=1, partition=IID())
        run = trainer(rounds=2).prepare(Classifier(MLP(hidden=(8,))), data)
        optimizer = torch.optim.SGD(run.evaluator.model.parameters(), lr=0.1, momentum=0.9)
        for round in (1, 2):
            for x, y in TrainLoader(data.federated, 0, run.options.seed, round):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(run.evaluator.model(x), y).backward()
                optimizer.step()
        return dict(run.evaluator.model.state_dict())

    assert equal_states(state(keep=True), by_hand())
    assert not equal_states(state(keep=True), state(keep=False))


# Observers


def test_gradient_dissimilarity_of_a_model_that_optimizes_by_hand_is_refused_early() -> None:
    model = NFClassifier(feature_dim=8, couplings=1, flow_width=8, backbone=MLP(hidden=(16,)))
    made = trainer(rounds=1, callbacks=[GradientDissimilarity()])
    with pytest.raises(FlsuiteError, match=r"NFClassifier optimizes by hand.*head_losses"):
        made.fit(model, digits(clients=2))
    assert made.round == 0
