"""The Lightning Trainer of a worker: one object that fits client after client.

``Trainer.fit`` checks its configuration, connects its parts and enters hooks that do nothing. On a
small client, that takes as long as a step, with the same outcome for every client. After a plain
fit, only the client-specific steps are repeated: the implemented hooks, the optimizer, and the
loader.
"""

import copy
import logging
import signal
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import (
    attach_to_fit,
    detects_anomalies,
    enter_hook,
    leave_hooks,
    make_slim,
    rewind,
    scaler_of,
    trainer_settings,
)
from flsuite.federation.client.loop import (
    LocalLoop,
    NeedsLightningLoopError,
    bound_hooks,
    only_optimizer,
)
from flsuite.federation.client.setup import refuse_callbacks


class ClientTrainer(Trainer):
    """A Lightning Trainer that is reusable for many fits.

    It has no logger, checkpoint, progress bar, model summary or validation. In the plain case,
    the local loop (``loop.py``) runs the steps. All other cases use Lightning's loop.

    Args:
        use_local_loop: Whether the local loop may run the steps.
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
        self._local_epochs = self.max_epochs or 1
        self._use_local_loop = use_local_loop
        self._was_plain = False
        self._plain_fit: _PlainFit | None = None

        make_slim(self)
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
        """Fit one client.

        Lightning sets up the first fit, and fits that are not the plain case.

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
        except SystemExit as end:
            if not isinstance(end.__context__, KeyboardInterrupt):
                raise  # the client's own code has called exit()
            # Lightning has set SIGINT to be ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt from None
        if self._was_plain:
            self._plain_fit = _PlainFit(self, model)

    def _run_stage(self) -> None:
        self.run_epochs()

    def run_epochs(self) -> None:
        """Run the part of a fit between the hooks ``on_fit_start`` and ``on_fit_end``."""
        refuse_callbacks(self.callbacks)  # type: ignore[attr-defined]  # also the model's own
        if self._scaler is not None:
            _refuse_fused(self.optimizers)
        local_loop = LocalLoop(self)
        with torch.autograd.set_detect_anomaly(detects_anomalies(self)):
            self._was_plain = self._use_local_loop and local_loop.is_plain()
            if self._was_plain:
                local_loop.run()
            elif self._plain_fit is not None:
                raise NeedsLightningLoopError("this fit is not the plain case that the first was")
            else:
                self.fit_loop.run()
        leave_hooks(self.lightning_module)


class _PlainFit:
    """Fits one model with the calls of ``Trainer.fit``, in its order.

    Args:
        trainer: It has fitted ``module`` once, with the local loop.
        module: The model of all its fits.
    """

    def __init__(self, trainer: ClientTrainer, module: LightningModule) -> None:
        self.trainer = trainer
        self.module = module

    def run(self, loader: Any) -> None:
        """Fit.

        Raises:
            NeedsLightningLoopError: If the optimizers do not fit the plain case.
        """
        trainer = self.trainer
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.training = True
        attach_to_fit(trainer, loader)

        try:
            self._call("prepare_data")
            self._call("setup", stage="fit")
            self._call("configure_model")
            trainer.strategy.model_to_device()
            enter_hook(self.module, "configure_optimizers")
            optimizer = only_optimizer(self.module)
            if not isinstance(optimizer, Optimizer):
                raise NeedsLightningLoopError("there is more than one optimizer, or a scheduler")
            trainer.strategy.optimizers = [optimizer]
            self._call("on_fit_start")
            trainer.run_epochs()
            self._call("on_fit_end")
            self._call("teardown", stage="fit")
        except BaseException as error:
            trainer.state.status = TrainerStatus.INTERRUPTED
            self._call("on_exception", error)
            raise

        leave_hooks(self.module)
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for method in bound_hooks(self.trainer, hook):
            method(*args, **kwargs)


def _refuse_fused(optimizers: Iterable[Optimizer]) -> None:
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
