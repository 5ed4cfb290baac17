"""Modules and data that know nothing of flsuite, as Lightning's users write them."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics import Accuracy, MeanAbsoluteError, R2Score

WORDS, CLASSES = 30, 3


def blobs(samples: int, seed: int) -> TensorDataset:
    """Return points around three centers, and the index of the center."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    x = torch.randn(samples, 4, generator=generator) + 2 * F.one_hot(y, 4)
    return TensorDataset(x, y)


def slope(samples: int, seed: int) -> TensorDataset:
    """Return a table whose target is nearly linear in its columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.1 * torch.randn(
        samples, generator=generator
    )
    return TensorDataset(x, y)


def plain_trainer(**settings: Any) -> Trainer:
    """Return Lightning's own Trainer, silent."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"max_epochs": 1, "accelerator": "cpu", **dict.fromkeys(quiet, False), **settings}
    return Trainer(**settings)


class Sentences(Dataset):
    """Sentences of unequal length. Most words of a sentence come from its topic."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(CLASSES, (samples,), generator=generator).tolist()
        self.words = []
        for topic in self.targets:
            length = int(torch.randint(3, 9, (1,), generator=generator))
            own = torch.randint(10, (length,), generator=generator) + 10 * topic
            noise = torch.randint(WORDS, (length,), generator=generator)
            keep = torch.rand(length, generator=generator) < 0.7
            self.words.append(torch.where(keep, own, noise) + 1)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"words": self.words[number], "topic": self.targets[number]}


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence([s["words"] for s in samples], batch_first=True)
    return {"words": words, "topic": torch.tensor([s["topic"] for s in samples])}


class Net(LightningModule):
    """A classifier with metrics, logs and a scheduler, built in its constructor."""

    def __init__(self, width: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, CLASSES))
        self.train_accuracy = Accuracy(task="multiclass", num_classes=CLASSES)
        self.accuracy = Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        self._evaluate("val", batch)

    def test_step(self, batch, batch_idx):
        self._evaluate("test", batch)

    def _evaluate(self, prefix, batch):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log(f"{prefix}_loss", F.cross_entropy(logits, y))
        self.log(f"{prefix}_accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.1, self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Regression(LightningModule):
    """A regression whose layers are made in configure_model, scored by torchmetrics."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net: nn.Module | None = None
        self.metrics = nn.ModuleDict({"r2": R2Score(), "mae": MeanAbsoluteError()})

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(5, 1)

    def training_step(self, batch):  # without batch_idx, which Lightning allows
        x, y = batch
        return F.mse_loss(self.net(x).squeeze(1), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        predicted = self.net(x).squeeze(1)
        for name, metric in self.metrics.items():
            metric(predicted, y)
            self.log(f"val_{name}", metric)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Reader(LightningModule):
    """A small transformer that tells the topic of a sentence."""

    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.lr = lr
        self.embed = nn.Embedding(WORDS + 1, width, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == 0
        encoded = self.encoder(self.embed(words), src_key_padding_mask=padding)
        return self.head(encoded.masked_fill(padding[..., None], 0).sum(1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["words"]), batch["topic"])
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        logits = self(batch["words"])
        right = (logits.argmax(1) == batch["topic"]).float().mean()
        self.log_dict({"test/loss": F.cross_entropy(logits, batch["topic"]), "test/acc": right})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Blobs(LightningDataModule):
    """A data module as in Lightning's tutorials."""

    def __init__(self, samples: int = 200, batch_size: int = 16) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def setup(self, stage: str) -> None:
        self.train, self.val = random_split(blobs(self.samples, 0), [0.8, 0.2])
        self.test = blobs(60, 1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=self.batch_size)
