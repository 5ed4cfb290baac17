"""Every module and data module of Lightning's own demos trains in a federation, or is refused."""

import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, demos, seed_everything
from lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    Net,
    RandomDictDataset,
    RandomIterableDatasetWithLen,
)
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from lightning.pytorch.demos.mnist_datamodule import MNISTDataModule
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer, WikiText2
from torch.nn import functional as F

from flsuite import FederatedTrainer
from flsuite.callbacks import RoundEarlyStopping
from flsuite.common.errors import FlsuiteError
from flsuite.data import FromDataModule, FromDataset
from flsuite.federation import Processes, Vectorized
from tests.conftest import equal_states, trainer


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where the demos find a short text and small digits, which they would download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_USE_MOCKED_MNIST", "1")
    Path("data").mkdir()
    Path("data/wikitext-2.txt").write_text("the cat sat on the mat\n" * 130)
    folder = Path("data/MNIST/complete")
    folder.mkdir(parents=True)
    for name in ("training", "test"):
        images = torch.randint(255, (30, 28, 28), dtype=torch.uint8)
        torch.save((images, torch.arange(30) % 10), folder / f"{name}.pt")


def boring(data: type[LightningDataModule] = BoringDataModule, **kwargs: Any) -> FromDataModule:
    return FromDataModule(data(), clients=3, batch_size=8, **kwargs)


def text() -> FromDataset:
    """Return blocks of words. The LSTM keeps its hidden state, so all batches have one size."""
    words = WikiText2(Path("data"))
    return FromDataset(words, words, clients=2, batch_size=4, val_fraction=0.0, train_samples=16)


def transformer() -> LightningTransformer:
    made = LightningTransformer(vocab_size=10)
    made.model = Transformer(vocab_size=10, ninp=8, nhid=8)
    return made


def lstm() -> LightningLSTM:
    made = LightningLSTM(vocab_size=10)
    made.model = SimpleLSTM(vocab_size=10, ninp=8, nhid=8)
    return made


MODELS: dict[type[LightningModule], tuple[Callable[[], LightningModule], Callable[[], Any]]] = {
    BoringModel: (BoringModel, boring),
    ManualOptimBoringModel: (ManualOptimBoringModel, boring),
    DemoModel: (DemoModel, boring),
    LightningTransformer: (transformer, text),
    LightningLSTM: (lstm, text),
}
DATA = {BoringDataModule, BoringDataModuleNoLen, IterableBoringDataModule, MNISTDataModule}


def fitted(
    model: type[LightningModule], rounds: int = 2, ckpt_path: str | None = None, **kwargs: Any
) -> FederatedTrainer:
    make_model, make_data = MODELS[model]
    seed_everything(1, verbose=False)
    made = trainer(rounds=rounds, **kwargs)
    made.fit(make_model(), make_data(), ckpt_path=ckpt_path)
    return made


def test_all_modules_of_the_demos_are_tried() -> None:
    found = {
        value
        for info in pkgutil.iter_modules(demos.__path__, f"{demos.__name__}.")
        for value in vars(importlib.import_module(info.name)).values()
        if isinstance(value, type) and value.__module__ == info.name
    }
    for kind, tried in ((LightningModule, set(MODELS)), (LightningDataModule, DATA)):
        assert {value for value in found if issubclass(value, kind)} == tried


@pytest.mark.parametrize("model", MODELS)
def test_a_module_without_scores_trains(
    model: type[LightningModule], caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    start = {name: value.clone() for name, value in MODELS[model][0]().state_dict().items()}
    made = fitted(model, enable_progress_bar=True)
    assert not equal_states(made.federation.state, start)

    rows = made.run.folder.table.rows
    assert {row.split for row in rows} == {"train"} and not made.run.summary.best
    losses = [row.value for row in rows if row.metric == "loss" and row.scope == "global"]
    (shown,) = re.findall(r"training loss +│ +(\S+)", capsys.readouterr().out)
    assert len(losses) == 2 and shown == f"{losses[-1]:.4f}"
    (line,) = [r.getMessage() for r in caplog.records if "no scores" in r.getMessage()]
    assert "for scores, add a validation_step and a test_step" in line
    with pytest.raises(FlsuiteError, match="the model has no scores"):
        made.test()


def test_a_run_without_scores_is_resumed(tmp_path: Path) -> None:
    whole = fitted(DemoModel, run_dir=tmp_path / "whole")
    run_dir = tmp_path / "run"
    fitted(DemoModel, rounds=1, run_dir=run_dir)
    resumed = fitted(DemoModel, run_dir=run_dir, ckpt_path="last")
    assert equal_states(whole.federation.state, resumed.federation.state)
    with pytest.raises(FlsuiteError, match="the model has no scores"):
        fitted(DemoModel, rounds=3, run_dir=run_dir, ckpt_path="last").test()
    with pytest.raises(
        FlsuiteError, match="RoundEarlyStopping stops by a score on validation data"
    ):
        fitted(DemoModel, callbacks=[RoundEarlyStopping("loss")])


@pytest.mark.parametrize("engine", [Processes(workers=2), Vectorized(clients=3)])
def test_engines_end_with_the_same_weights_without_scores(engine: Any) -> None:
    one, other = (fitted(DemoModel, engine=own).federation.state for own in (None, engine))
    # A stack rounds otherwise on some CPUs.
    tolerance = 1e-6 if isinstance(engine, Vectorized) else 0.0
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[n], other[n], rtol=tolerance, atol=tolerance) for n in one)


class Returns(BoringModel):
    """Returns losses as Lightning's users do."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.step(batch) + 1}


def test_a_returned_loss_is_a_score() -> None:
    data = boring()
    made = trainer(rounds=1)
    made.fit(model := Returns(), data)
    (whole, *clients) = made.test()
    samples = torch.stack([data.data.random_test[n] for n in range(64)])
    with torch.no_grad():
        assert whole["loss"] == pytest.approx(float(model.step(samples)) + 1, rel=1e-5)
        own = samples[made.federation.data.test.rows[2]]
        assert clients[2]["loss"] == pytest.approx(float(model.step(own)) + 1, rel=1e-5)
    assert made.run.summary.best.keys() >= {"round", "loss"}, "picked on validation data"
    assert made.validate()[0]["loss"] < whole["loss"]


def test_a_value_that_few_samples_leave_undefined_may_pick_the_round(caplog: Any) -> None:
    class Rare(Returns):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("auc", 0.5 if batch_idx else math.nan, reduce_fx="max")

    made = trainer(rounds=1, monitor="auc")
    made.fit(Rare(), boring())
    assert made.run.settings["monitor"] == "auc" and "no scores" not in caplog.text


class TrainAlone(BoringDataModule):
    val_dataloader = LightningDataModule.val_dataloader
    test_dataloader = LightningDataModule.test_dataloader


def test_data_without_a_test_loader_train_too(caplog: Any, capsys: Any) -> None:
    """Clients hold out samples for validation. Without them, nothing has scores."""
    made = trainer(rounds=2, enable_progress_bar=True)
    made.fit(Returns(), boring(TrainAlone))
    out = capsys.readouterr().out
    (shown, _) = re.findall(r"validation loss +│ +(\S+) │ +(\S+)", out)[0]
    assert "without test scores" in out
    assert shown == f"{made.callback_metrics['val/loss']:.4f}"
    assert len(made.federation.data.val) == 6 and "no scores" not in caplog.text

    made = trainer(rounds=1)
    made.fit(Returns(), boring(TrainAlone, val_fraction=0.0))
    assert "the data has no scores" in caplog.text and "add a val_dataloader" in caplog.text
    assert made.federation.data.train.rows.lengths().sum() == 64
    with pytest.raises(FlsuiteError, match=r"trainer\.monitor: the data has no scores"):
        trainer(rounds=1, monitor="loss").fit(Returns(), boring(TrainAlone, val_fraction=0.0))


def test_a_stream_is_refused_or_read_once() -> None:
    with pytest.raises(FlsuiteError, match="an IterableDataset, whose samples cannot be divided"):
        boring(BoringDataModuleNoLen).setup()
    stream = RandomIterableDatasetWithLen(32, 9)
    with pytest.raises(FlsuiteError, match=r"test is an IterableDataset.*set in_memory: true"):
        FromDataset(RandomDictDataset(32, 9), stream).setup()
    with pytest.raises(FlsuiteError, match="must return one torch DataLoader"):
        boring(IterableBoringDataModule).setup()

    made = trainer(rounds=1)
    made.fit(Returns(), boring(BoringDataModuleNoLen, in_memory=True))
    data = made.federation.data
    assert (len(data.train), len(data.val), len(data.test)) == (512, 128, 256)
    first, again = (next(data.train.batches([torch.arange(4)])) for _ in range(2))
    assert torch.equal(first, again), "one draw of each sample"
    assert len(made.test()) == 4


class Digits(LightningModule):
    """The demos' network of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.nll_loss(self.net(batch[0]), batch[1])

    validation_step = training_step
    configure_optimizers = DemoModel.configure_optimizers
    learning_rate = 0.01


def test_the_digits_of_the_demos() -> None:
    data = MNISTDataModule("data", val_split=10, num_workers=0, batch_size=8)
    made = trainer(rounds=1)
    made.fit(Digits(), FromDataModule(data, clients=2))
    assert made.federation.data.spec.num_classes == 10
    assert made.test()[0].keys() >= {"loss", "loss_client_mean"}
