"""A client half that measures the trained model and leaves it as it is."""

import time
from abc import ABC, abstractmethod

from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.data.loader import TrainLoader
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext

__all__ = ["AfterFit"]


class AfterFit(Callback, ABC):
    """Measures the trained model at the end of a client's fit.

    It changes neither the weights nor the generators of random numbers. A fit whose weights are
    known already can therefore be measured without training again: its result depends on the
    weights, the client's samples, the seed and the round alone.

    Its seconds are logged as ``after_fit_seconds``.

    Args:
        client: The fit. The result goes into ``client.extras``.
    """

    def __init__(self, client: ClientContext) -> None:
        self.client = client

    @abstractmethod
    def after_fit(self, module: LightningModule, loader: TrainLoader) -> None:
        """Measure the model on the client's samples.

        Args:
            module: The trained model.
            loader: The client's training batches, see
                :meth:`~flsuite.data.loader.TrainLoader.plain_batches`.
        """

    def measure(self, module: LightningModule, loader: TrainLoader) -> None:
        """Measure the model, and the seconds that this takes."""
        started = time.perf_counter()
        self.after_fit(module, loader)
        self.client.metrics["after_fit_seconds"] = time.perf_counter() - started

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, TrainLoader):
            raise FlsuiteError(
                f"{type(self).__name__} needs the training batches of flsuite, and a hook has "
                f"replaced them by {type(loader).__name__}"
            )
        self.measure(pl_module, loader)
