"""The Lightning Trainer of a worker: one object that fits client after client, without what a fit of its own would need."""

import logging
import signal
import warnings
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Trainer

from flsuite.client.loop import LocalLoop

__all__ = ["ClientTrainer", "quiet_lightning"]


class ClientTrainer(Trainer):
    """Lightning's own Trainer, slim and reusable.

    Loggers, checkpoints, bars and validation belong to the federation. What Lightning does once per fit, and a federation
    would pay for once per client, is left out: the sanity check's snapshot of all generators, signal handlers, the search
    for checkpoints, and the module's way back to the CPU. In the plain case the steps themselves are
    :class:`~flsuite.client.loop.LocalLoop`'s; a model that calls ``self.log`` stays with Lightning's loop, and what it logs
    becomes metrics of the client.

    Args:
        kwargs: Of :class:`lightning.pytorch.Trainer`.

    Attributes:
        lean: Whether the local loop may be used.
    """

    def __init__(self, **kwargs: Any) -> None:
        quiet_lightning()
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
        self.local_epochs = self.max_epochs or 1
        self.lean = True
        self._logs = (
            True  # the first fit takes Lightning's loop, which tells whether the model logs
        )
        # The next client is about to use the module where it is.
        self.strategy.teardown = _nothing  # type: ignore[method-assign]
        self.strategy.model_to_device = self._model_to_device  # type: ignore[method-assign]
        self._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
        self._signal_connector.teardown = _nothing  # type: ignore[method-assign]
        connector = (
            self._checkpoint_connector
        )  # looks for checkpoints, and for a cluster that left one, in every fit
        for name in (
            "_restore_modules_and_callbacks",
            "_select_ckpt_path",
            "restore_training_state",
            "resume_end",
        ):
            setattr(connector, name, _nothing)

    @property
    def steps(self) -> int:
        """Steps of the model in this fit: under manual optimisation a batch is one, however many optimizers it steps."""
        by_hand = not self.lightning_module.automatic_optimization
        return self.fit_loop.epoch_loop._batches_that_stepped if by_hand else self.global_step

    def rewind(self, extra_epochs: int = 0) -> None:
        """As if nothing had been fitted: a second ``fit`` of a finished Trainer would silently do nothing."""
        self.should_stop = False
        loop = self.fit_loop
        loop.max_epochs = self.local_epochs + extra_epochs
        loop.epoch_progress.reset()
        loop.epoch_loop.batch_progress.reset()
        loop.epoch_loop.scheduler_progress.reset()
        loop.epoch_loop._batches_that_stepped = 0
        loop.epoch_loop.automatic_optimization.optim_progress.reset()
        loop.epoch_loop.manual_optimization.optim_step_progress.reset()

    def _model_to_device(self) -> None:
        """Move the module, unless it is there already: walking through it takes longer than a small step."""
        device, module = self.strategy.root_device, self.lightning_module
        if any(tensor.device != device for tensor in chain(module.parameters(), module.buffers())):
            module.to(device)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Lightning answers Ctrl-C by exiting, and deaf to the next one; the federation wants to close its books first."""
        try:
            super().fit(*args, **kwargs)
        except SystemExit:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt from None

    def _run_stage(self) -> None:
        self.lightning_module.zero_grad()
        with torch.autograd.set_detect_anomaly(self._detect_anomaly):
            local = LocalLoop(self)
            if self.lean and not self._logs and local.fits():
                local.run()
            else:
                self.fit_loop.run()
        self.lightning_module._current_fx_name = None
        self._logs = bool(self.fit_loop.epoch_loop._results)


def quiet_lightning() -> None:
    """Lightning speaks up once per fit; here that would be once per client."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for message in (
        ".*no `val_dataloader`.*",
        ".*LeafSpec.*",
        ".*does not have many workers.*",
        ".*GPU available but.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
