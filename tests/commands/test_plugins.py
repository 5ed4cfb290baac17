"""The command with classes that know nothing of flsuite, by their dotted path."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests.commands.command import Capture, cli, refused

MODEL = """
import torch
from flsuite.aggregators import FedAvg, Proximal
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.body(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Faulty(Net):
    def __init__(self):
        super().__init__()
        self.x = nothing


class Unscored(Net):
    test_step = LightningModule.test_step


class Unstored(Net):
    def __init__(self, rate: float = 0.1):
        super().__init__(lr=1.0)
        self.factor = rate / 2

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.factor)


class Prox(FedAvg):
    def __init__(self, strength: float = 0.1, **kwargs):
        super().__init__(objective=Proximal(strength), **kwargs)


class Counter(Callback):
    def __init__(self, start: int):
        self.count = start + 1


class MyData(LightningDataModule):
    def __init__(self, samples: int = 60):
        super().__init__()
        self.samples = samples

    def train_dataloader(self):
        return DataLoader(self._points(self.samples), batch_size=8)

    def test_dataloader(self):
        return DataLoader(self._points(30), batch_size=8)

    def _points(self, samples):
        x = torch.randn(samples, 4)
        return TensorDataset(x, (x.sum(1) > 0).long())


class Untested(MyData):
    test_dataloader = LightningDataModule.test_dataloader
"""
FAST = ("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false")
OWN = ("--model", "my_package.Net", "--data", "my_package.MyData")


@pytest.fixture(autouse=True)
def _my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package.py").write_text(MODEL)
    # A refused command leaves nothing behind, which its first import would with bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_fit_resume_test_and_config(tmp_path: Path) -> None:
    rounds = ("--trainer.rounds", "1", "--run_dir", "run", *FAST)
    assert cli("fit", *OWN, "--model.width", "6", "--data.samples", "80", *rounds) == 0
    settings = yaml.safe_load(Path("run/settings.yaml").read_text())
    assert settings["model"]["init_args"]["width"] == 6
    assert settings["data"]["init_args"]["clients"] == 10

    config = ("--config", "run/config.yaml", "--run_dir", "run")
    assert cli("fit", *config, "--ckpt_path", "last", "--trainer.rounds", "2") == 0
    assert cli("test", *config, "--trainer.rounds", "2") == 0
    assert Path("run/checkpoints/model.ckpt").is_file()


@pytest.mark.long
def test_clients_and_partition_of_a_plain_data_module(capsys: Capture) -> None:
    wrapped = ("--data", "FromDataModule", "--data.data", "my_package.MyData")
    split = ("--data.clients", "3", "--data.partition", "Dirichlet", "--data.partition.alpha", "1")
    assert cli("partition", *wrapped, *split) == 0
    assert "training samples" in capsys.readouterr().out
    rounds = ("--trainer.rounds", "1", "--run_dir", "run", *FAST)
    assert cli("fit", "--model", "my_package.Net", *wrapped, *split, *rounds) == 0


@pytest.mark.long
def test_what_each_client_adds_to_a_model_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = ("--data", "FromDataModule", "--data.data", "my_package.MyData")
    split = ("--data.clients", "2", "--trainer.rounds", "1", "--run_dir", "run")
    assert cli("fit", "--model", "my_package.Net", *wrapped, *split, *FAST) == 0
    # A new process finds the package by the working folder alone.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != os.getcwd()])
    monkeypatch.delitem(sys.modules, "my_package")
    assert cli("contribution", "run", "--output", "loo", "--metric", "loss", "--clients", "1") == 0
    assert Path("loo/contribution.csv").is_file()


def test_arguments_that_a_class_does_not_store_are_settings(capsys: Capture) -> None:
    own = ("--model", "my_package.Unstored", "--data", "my_package.MyData")
    own += ("--trainer.aggregator", "my_package.Prox", "--trainer.callbacks", "my_package.Counter")
    rounds = ("--trainer.callbacks.start", "3", "--run_dir", "run", *FAST)
    assert cli("fit", *own, *rounds, "--model.rate", "0.2", "--trainer.rounds", "1") == 0
    settings = yaml.safe_load(Path("run/settings.yaml").read_text())
    assert settings["model"]["init_args"]["rate"] == 0.2
    assert settings["aggregator"]["init_args"]["strength"] == 0.1
    assert [one["init_args"] for one in settings["callbacks"]] == [{"start": 3}]

    again = ("resume", "run", "--trainer.rounds", "2")
    line = refused(capsys, *again, "--trainer.aggregator.strength", "0.5")
    assert "aggregator.strength is 0.5 here and 0.1 there" in line
    assert cli(*again) == 0


def test_a_model_without_scores_trains_by_the_command(capsys: Capture) -> None:
    own = ("--model", "my_package.Unscored", "--data", "my_package.Untested", *FAST[:2])
    assert cli("fit", *own, "--trainer.rounds", "1", "--run_dir", "run") == 0
    out = capsys.readouterr().out
    assert "without test scores" in out and "training loss" in out
    assert Path("run/curves.png").is_file(), "of the training loss"
    assert "no run has test scores: give the data a test split" in refused(capsys, "report", "run")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--model", "my_package.Nett", *OWN[2:]), "has no class Nett (did you mean Net?)"),
        (("--model", "my_package.Faulty", *OWN[2:]), "is not defined (my_package.py, line"),
        (OWN[:2], "there is no data; add data to the config, or give --data"),
        ((*OWN, "--model.widht", "3"), "did you mean --model.width?"),
        (
            (*OWN, "--trainer.monitor", "acc"),
            "monitor must be one of loss, loss_client_mean, loss_client_worst, got 'acc'",
        ),
    ],
)
def test_a_missing_piece_is_one_line(args: tuple[str, ...], line: str, capsys: Capture) -> None:
    assert line in refused(capsys, "fit", *args, *FAST)
