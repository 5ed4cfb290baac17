"""The fits of a Trainer after its first one.

``Trainer.fit`` checks its configuration, connects its parts and enters hooks that do nothing. On a
small client that takes as long as a step, and its outcome is the same for every client. After a
plain fit only what differs from client to client is done again: the hooks that are implemented, the
optimizer, and the loader.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from flsuite.client.loop import NeedsLightningLoopError, implements
from flsuite.lightning_internals import attach_to_fit, enter_hook, leave_hooks, run_stage

__all__ = ["PlainFit"]


class PlainFit:
    """Fits one model with the calls of ``Trainer.fit``, in its order.

    Args:
        trainer: It has fitted ``module`` once, with :class:`~flsuite.client.loop.LocalLoop`.
        module: The model of all its fits.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer = trainer
        self.module = module

    def run(self, loader: Any) -> None:
        """Fit.

        Raises:
            NeedsLightningLoopError: If the optimizers are not those of the plain case.
        """
        trainer = self.trainer
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.training = True
        attach_to_fit(trainer, loader)

        try:
            self._call_model("prepare_data")
            self._call("setup", stage="fit")
            self._call_model("configure_model")
            trainer.strategy.model_to_device()
            enter_hook(self.module, "configure_optimizers")
            trainer.strategy.optimizers = [_single(self.module.configure_optimizers())]
            self._call("on_fit_start")
            run_stage(trainer)
            self._call("on_fit_end")
            self._call("teardown", stage="fit")
        except BaseException as error:
            trainer.state.status = TrainerStatus.INTERRUPTED
            self._call_callbacks("on_exception", error)
            raise

        leave_hooks(self.module)
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None

    def _call(self, hook: str, **kwargs: Any) -> None:
        """Call a hook in Lightning's order: callbacks in theirs, then the model."""
        self._call_callbacks(hook, **kwargs)
        self._call_model(hook, **kwargs)

    def _call_model(self, hook: str, **kwargs: Any) -> None:
        if implements(self.module, LightningModule, hook):
            enter_hook(self.module, hook)
            getattr(self.module, hook)(**kwargs)

    def _call_callbacks(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if implements(callback, Callback, hook):
                enter_hook(self.module, hook)
                getattr(callback, hook)(self.trainer, self.module, *args, **kwargs)


def _single(optimizers: Any) -> Optimizer:
    """Return the optimizer of the plain case, which Lightning would take from the same value."""
    if isinstance(optimizers, (list, tuple)) and len(optimizers) == 1:
        optimizers = optimizers[0]
    if isinstance(optimizers, dict) and set(optimizers) == {"optimizer"}:
        optimizers = optimizers["optimizer"]
    if not isinstance(optimizers, Optimizer):
        raise NeedsLightningLoopError("there is more than one optimizer, or a scheduler")
    return optimizers
