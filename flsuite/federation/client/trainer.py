"""The Lightning Trainer of a worker: one object that fits client after client."""

import copy
import logging
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import (
    clip_what_is_there,
    detects_anomalies,
    leave_hooks,
    make_slim,
    rewind,
    scaler_of,
    trainer_settings,
)
from flsuite.federation.client.setup import refuse_callbacks


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C, while Lightning fits or scores a model.

    Lightning would exit and ignore the next Ctrl-C, but the federation still has to close its run.
    """
    try:
        yield
    except (SystemExit, ValueError) as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise  # from the client's own code, which may call exit()
        # Lightning has set SIGINT to be ignored, or has failed to, which only the main thread may.
        if isinstance(end, SystemExit):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt from None


class ClientTrainer(Trainer):
    """A Lightning Trainer that is reusable for many fits.

    It has no logger, checkpoint, progress bar, model summary or validation.

    Args:
        kwargs: Arguments of :class:`lightning.pytorch.Trainer`.

    Attributes:
        given: The same arguments.
    """

    def __init__(self, **kwargs: Any) -> None:
        quiet_lightning()
        if kwargs.get("plugins") is not None:
            # A plugin may hold a gradient scaler, which other Trainers must not share.
            kwargs["plugins"] = copy.deepcopy(kwargs["plugins"])
        super().__init__(
            **kwargs,
            logger=False,
            callbacks=None,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
        )

        self.given = kwargs
        # max_epochs itself changes with every fit that has a warm-up.
        self._local_epochs = self.max_epochs or 1
        make_slim(self)
        clip_what_is_there(self)
        self._settings = trainer_settings(self)
        self._scaler = scaler_of(self)
        self._scaling = {} if self._scaler is None else self._scaler.state_dict()

    def rewind(self, extra_epochs: int, epochs: int | None) -> None:
        """Prepare for the next fit.

        Args:
            extra_epochs: Epochs in addition.
            epochs: Epochs in place of the configured epochs and steps, if any.
        """
        rewind(self, (epochs or self._local_epochs) + extra_epochs, self._settings)
        if epochs:
            self.fit_loop.epoch_loop.max_steps = -1
        if self._scaler is not None:
            # A scale adapted in one client's fit would change the next client's steps.
            self._scaler.load_state_dict(self._scaling)

    def fit(  # type: ignore[override]
        self, model: LightningModule, train_dataloaders: Iterable[Any]
    ) -> None:
        """Fit one client in Lightning's own loop."""
        with raising_interrupts():
            super().fit(model, train_dataloaders)

    def _run_stage(self) -> None:
        refuse_callbacks(self.callbacks)  # type: ignore[attr-defined]  # also the model's own
        if self._scaler is not None:
            refuse_fused(self.optimizers)
        with torch.autograd.set_detect_anomaly(detects_anomalies(self)):
            self.fit_loop.run()
        leave_hooks(self.lightning_module)


def refuse_fused(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that unscale gradients themselves, after an algorithm has changed them."""
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise FlsuiteError(
                f"trainer.precision 16-mixed: {type(optimizer).__name__} unscales gradients within "
                "its step, but the terms of an algorithm come before that; leave out its fused=True"
            )


def quiet_lightning() -> None:
    """Silence Lightning's messages per fit, which here means per client."""
    for name in ("utilities.rank_zero", "accelerators.cuda"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.WARNING)
    for message in (
        ".*no `val_dataloader`.*",
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        ".*GPU available but.*",
    ):
        warnings.filterwarnings("ignore", message=message)
