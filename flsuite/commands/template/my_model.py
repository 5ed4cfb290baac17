"""The model that every client trains: any LightningModule."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class MyModel(LightningModule):
    """A small network for images of 8x8 pixels and ten classes.

    Args:
        hidden: Units of the hidden layer.
        lr: Learning rate.
    """

    def __init__(self, hidden: int = 64, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    # These two log the scores of a round: val_accuracy picks the best round.
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_scores("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_scores("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _log_scores(self, split: str, batch: Batch) -> None:
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        self.log(f"{split}_loss", F.cross_entropy(logits, y))
        self.log(f"{split}_accuracy", accuracy)
