"""What rules share whose clients measure their trained model, without changing it.

A fit that was trained elsewhere is measured alike: what a client sends depends only on its weights,
its samples, the seed and the round.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule

from flsuite.common.client import ClientContext
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import torch_generator
from flsuite.data.federated import Batch
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.estimates import measuring
from flsuite.models.abilities import LogitModel


@contextmanager
def after_fit(client: ClientContext, module: LightningModule) -> Iterator[None]:
    """Measure in evaluation mode and float32, and log the duration as ``after_fit_seconds``.

    The modes and the random generators are restored on exit.
    """
    started = time.perf_counter()
    with measuring(module):
        yield
    client.metrics["after_fit_seconds"] = time.perf_counter() - started


def plain_batches(
    module: LightningModule, loader: TrainLoader, samples: int | None = None
) -> Iterator[Batch]:
    """Yield the client's samples on the model's device, see :meth:`TrainLoader.plain_batches`."""
    for x, y in loader.plain_batches(samples):
        yield x.to(module.device), y.to(module.device)


def training_batches(module: LightningModule, loader: TrainLoader) -> Iterator[Any]:
    """Yield the batches of an epoch on the model's device, as its training steps receive them."""
    for batch in loader:
        changed = module.on_before_batch_transfer(batch, 0)
        moved = module.transfer_batch_to_device(changed, module.device, 0)
        yield module.on_after_batch_transfer(moved, 0)


def own_draws(owner: str, loader: TrainLoader) -> torch.Generator:
    """Return a client's randomness for what an aggregator measures in this round."""
    return torch_generator(loader.seed, owner, loader.round, loader.client)


def require_logits(owner: str, model: LightningModule) -> None:
    """Refuse a model without logits.

    Raises:
        FlsuiteError: If it has no such method.
    """
    if not isinstance(model, LogitModel):
        raise FlsuiteError(
            f"{owner} needs the logits of the model, but {type(model).__name__} has none: add a "
            "method logits(x) -> (n, outputs), or choose another aggregator"
        )
