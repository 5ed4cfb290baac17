"""Shared functions of rules whose clients measure their trained model, without changing it.

What a client sends depends only on its weights, its samples, the seed and the round. So a fit that
was trained elsewhere is measured in the same way.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from flsuite.common.client import ClientContext
from flsuite.data.federated import Batch
from flsuite.data.loader import TrainLoader
from flsuite.metrics.fisher.estimates import measuring


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
