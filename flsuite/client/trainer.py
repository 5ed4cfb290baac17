"""The Lightning Trainer of a worker: one object that fits client after client."""

import copy
import logging
import signal
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from flsuite.client.loop import LocalLoop, NeedsLightningLoopError
from flsuite.client.refit import PlainFit
from flsuite.client.setup import refuse_callbacks
from flsuite.errors import FlsuiteError
from flsuite.lightning_internals import (
    detects_anomalies,
    leave_hooks,
    make_slim,
    rewind,
    scaler_of,
    trainer_settings,
)

__all__ = ["ClientTrainer", "quiet_lightning"]


class ClientTrainer(Trainer):
    """Lightning's Trainer without what belongs to the federation, reusable for many fits.

    It has no logger, checkpoint, progress bar, model summary or validation. In the plain case
    :class:`~flsuite.client.loop.LocalLoop` takes the steps. All other cases take Lightning's loop.

    Args:
        use_local_loop: Whether :class:`~flsuite.client.loop.LocalLoop` may take the steps.
        kwargs: Arguments of :class:`lightning.pytorch.Trainer`.
    """

    def __init__(self, use_local_loop: bool = True, **kwargs: Any) -> None:
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

        # max_epochs itself changes with every fit that has a warm-up.
        self.local_epochs = self.max_epochs or 1
        self.use_local_loop = use_local_loop
        self._was_plain = False
        self._plain_fit: PlainFit | None = None

        make_slim(self)
        self._settings = trainer_settings(self)
        self._scaler = scaler_of(self)
        self._scaling = {} if self._scaler is None else self._scaler.state_dict()

    def rewind(self, extra_epochs: int = 0) -> None:
        """Get ready for the next fit.

        It has ``extra_epochs`` more epochs than were configured.
        """
        rewind(self, self.local_epochs + extra_epochs, self._settings)
        if self._scaler is not None:
            # A scale that one client's fit has found would change the next client's steps.
            self._scaler.load_state_dict(self._scaling)

    def fit(  # type: ignore[override]
        self, model: LightningModule, train_dataloaders: Iterable[Any]
    ) -> None:
        """Fit one client.

        Lightning sets up the first fit, and those that are not the plain case.

        Raises:
            KeyboardInterrupt: On Ctrl-C. Lightning would exit and ignore the next Ctrl-C, but the
                federation still has to close its run.
        """
        again = self._plain_fit
        try:
            if again is not None and again.module is model:
                again.run(train_dataloaders)
                return
            super().fit(model, train_dataloaders)
        except SystemExit:
            # Lightning has set Ctrl-C to be ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt from None
        if self._was_plain:
            self._plain_fit = PlainFit(self, model)

    def _run_stage(self) -> None:
        refuse_callbacks(self.callbacks)  # type: ignore[attr-defined]  # also the model's own
        if self._scaler is not None:
            _refuse_fused(self.optimizers)
        local_loop = LocalLoop(self)
        with torch.autograd.set_detect_anomaly(detects_anomalies(self)):
            self._was_plain = self.use_local_loop and local_loop.is_plain()
            if self._was_plain:
                local_loop.run()
            elif self._plain_fit is not None:
                raise NeedsLightningLoopError("this fit is not the plain case that the first was")
            else:
                self.fit_loop.run()
        leave_hooks(self.lightning_module)


def _refuse_fused(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that unscale gradients themselves, after an algorithm has added to them."""
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise FlsuiteError(
                f"trainer.precision 16-mixed: {type(optimizer).__name__} unscales gradients within "
                "its step, and the terms of an algorithm come before that; leave out its fused=True"
            )


def quiet_lightning() -> None:
    """Silence the lines that Lightning prints once per fit, which here means once per client."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for message in (
        ".*no `val_dataloader`.*",
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        ".*GPU available but.*",
    ):
        warnings.filterwarnings("ignore", message=message)
