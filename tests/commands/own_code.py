"""Models, rules and data of a user, most of them with a mistake."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.aggregators import CohortRule, LinearRule, Objective, Transform


class Net(LightningModule):
    """A plain classifier of digits, scored by what it logs.

    Args:
        width: Numbers per sample. Digits have 64.
        classes: Number of outputs. Digits have 10 classes.
    """

    score = "acc"

    def __init__(self, width: int = 64, classes: int = 10, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluate("test", batch)

    def evaluate(self, split: str, batch: Any) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{split}/loss", F.cross_entropy(logits, y))
        self.log(f"{split}/{self.score}", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class FailsAlways(Net):
    """Fails in the third step of every fit, when weights have changed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ValueError(f"batch of {len(batch[0])}")
        return super().training_step(batch, batch_idx)


class FailsAtTwo(Net):
    """Fails for two clients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loader: Any = self.trainer.train_dataloader
        if loader.client in (3, 4):
            raise ValueError("no scanner")
        return super().training_step(batch, batch_idx)


class ScoredByKappa(Net):
    score = "kappa"


class FailsInValidation(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise KeyError("a mask")


class FailsWhenTrained(Net):
    """Fails in its test step, but not before the first round."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fits", torch.tensor(0))

    def on_train_end(self) -> None:
        self.fits += 1

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if self.fits:
            raise KeyError("a mask")
        super().test_step(batch, batch_idx)


class WithLogits(LightningModule):
    """A classifier without steps for scores.

    Args:
        classes: Number of outputs. Digits have 10 classes.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.logits = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SkipsBatches(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class WithoutSuper(LightningModule):
    def __init__(self) -> None:
        self.net = nn.Linear(64, 10)


class WithoutSuperOrLayers(LightningModule):
    def __init__(self) -> None:
        """Forget what a module needs."""


class RaisesInCombine(CohortRule):
    def combine(self, server: Any, updates: Any) -> Any:
        raise ValueError("no model")


class NoTerms(LinearRule):
    def terms(self, update: Any, layout: Any) -> Any:
        return None

    def result(self, server: Any, sums: Any, updates: Any) -> Any:
        return server.state


class Encodes(Transform):
    def encode(self, payload: Any, fit: Any) -> Any:
        return payload


class NoEncode(Transform):
    def encode(self, payload: Any, fit: Any) -> Any:
        return None


class RaisesInEncode(Transform):
    def encode(self, payload: Any, fit: Any) -> Any:
        raise ValueError("no code")


class NoDecode(Encodes):
    def decode(self, payload: Any, template: Any, received: Any) -> Any:
        return None


class RaisesInDecode(Encodes):
    def decode(self, payload: Any, template: Any, received: Any) -> Any:
        raise KeyError("no code")


class NoTemplate(Encodes):
    def template(self, template: Any) -> Any:
        return None


class NoAggregate(Encodes):
    def on_aggregate(self, server: Any, model: Any, sums: Any, updates: int) -> Any:
        return None


class Misspelt(Objective):
    def start(self, client: Any, w: Any) -> Any:
        return w, {}

    def gradiant(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        return oracle(w, batch), held


class Sharp(Objective):
    """Asks for the gradient at other weights, which a skipped batch does not have."""

    def gradient(self, oracle: Any, w: Any, held: Any, batch: Any) -> Any:
        g = oracle(w, batch)
        norm = sum(value.square().sum() for value in g.values()) ** 0.5 + 1e-12
        return oracle({k: w[k] + 0.05 * g[k] / norm for k in g}, batch), held
