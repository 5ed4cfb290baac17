"""The steps of a client's fit, with nothing between them but the hooks that somebody implements.

Lightning's own loop keeps progress, results and profiles of every batch; on a small model that costs a fifth of a step. For
the plain case (one optimizer, stepped once a batch, no schedulers) this loop makes the same calls in the same order and so
the same weights, bit for bit. Everything else takes Lightning's.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

__all__ = ["LocalLoop"]

_OWN_STEPS = (  # a model that overrides one of these takes Lightning's loop
    "backward",
    "configure_gradient_clipping",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)


class LocalLoop:
    """One client's fit, on a Trainer that Lightning has set up for it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module

    def fits(self) -> bool:
        """Whether this is the plain case."""
        trainer, module, precision = self.trainer, self.module, self.trainer.precision_plugin
        return (
            module.automatic_optimization
            and len(trainer.optimizers) == 1
            and _steps_alone(trainer.optimizers[0])
            and not trainer.lr_scheduler_configs
            and trainer.accumulate_grad_batches == 1
            and _all_of(trainer.limit_train_batches)
            and not trainer.overfit_batches  # type: ignore[attr-defined]
            and not trainer.fast_dev_run  # type: ignore[attr-defined]
            and trainer.max_steps == -1
            and not trainer.min_steps
            and not trainer.min_epochs
            and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
            and type(precision) in (Precision, MixedPrecision)
            and getattr(precision, "scaler", None) is None
            and all(
                getattr(type(module), name) is getattr(LightningModule, name) for name in _OWN_STEPS
            )
        )

    def run(self) -> None:
        """All epochs of the fit."""
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        loader = fit_loop._data_source.dataloader()
        fit_loop._combined_loader = CombinedLoader(
            loader, "max_size_cycle"
        )  # for trainer.train_dataloader
        fit_loop.max_batches = len(loader)
        self._collect_hooks()
        self._call(self._train_start)
        progress = fit_loop.epoch_progress
        while progress.current.completed < (fit_loop.max_epochs or 1) and not trainer.should_stop:
            progress.increment_ready()
            self._call(self._epoch_start)
            progress.increment_started()
            for index, batch in enumerate(loader):
                self._step(
                    batch if self._is_here(batch) else trainer.strategy.batch_to_device(batch),
                    index,
                )
                if trainer.should_stop:
                    break
            progress.increment_processed()
            self._call(self._epoch_end)
            progress.increment_completed()
        self._call(self._train_end)

    def _is_here(self, batch: Any) -> bool:
        device = self.trainer.strategy.root_device
        return isinstance(batch, tuple) and all(
            isinstance(part, Tensor) and part.device == device for part in batch
        )

    def _step(self, batch: Any, index: int) -> None:
        trainer, module = self.trainer, self.module
        optimizer, precision = trainer.optimizers[0], trainer.precision_plugin
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.increment_ready()
        self._call(self._batch_start, batch, index)
        module._current_fx_name = "training_step"  # lets the model call self.log
        with precision.train_step_context():
            output: Any = module.training_step(batch, index)
        loss: Tensor | None = output.get("loss") if isinstance(output, dict) else output
        self._call(self._before_zero_grad, optimizer)
        optimizer.zero_grad()
        if loss is not None:
            self._call(self._before_backward, loss)
            loss.backward()
            self._call(self._after_backward)
        self._call(self._before_step, optimizer)
        if trainer.gradient_clip_val:
            module.configure_gradient_clipping(
                optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )
        optimizer.step()
        loop.automatic_optimization.optim_progress.optimizer.step.increment_ready()
        loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        extra = output if isinstance(output, dict) else {}
        self._call(
            self._batch_end, {} if loss is None else {**extra, "loss": loss.detach()}, batch, index
        )
        loop.batch_progress.increment_completed()

    def _collect_hooks(self) -> None:
        self._train_start = self._implementations("on_train_start")
        self._train_end = self._implementations("on_train_end")
        self._epoch_start = self._implementations("on_train_epoch_start")
        self._epoch_end = self._implementations("on_train_epoch_end")
        self._batch_start = self._implementations("on_train_batch_start")
        self._batch_end = self._implementations("on_train_batch_end")
        self._before_zero_grad = self._implementations("on_before_zero_grad")
        self._before_backward = self._implementations("on_before_backward")
        self._after_backward = self._implementations("on_after_backward")
        self._before_step = self._implementations("on_before_optimizer_step")

    def _implementations(self, hook: str) -> list[Callable[..., Any]]:
        """Who implements a hook: callbacks in their order, then the model."""
        found: list[Callable[..., Any]] = []
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if getattr(type(callback), hook) is not getattr(Callback, hook):
                found.append(_bind(getattr(callback, hook), self.trainer, self.module))
        if getattr(type(self.module), hook) is not getattr(LightningModule, hook):
            found.append(_named(getattr(self.module, hook), self.module, hook))
        return found

    @staticmethod
    def _call(hooks: list[Callable[..., Any]], *args: Any) -> None:
        for hook in hooks:
            hook(*args)


def _all_of(limit: int | float | None) -> bool:
    """Whether Lightning takes every batch: a fraction of 1.0 is all of them, the number 1 is one batch."""
    return limit is None or (isinstance(limit, float) and limit == 1.0)


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` needs no closure: torch's own but LBFGS; third-party ones may insist on it."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


def _bind(
    hook: Callable[..., Any], trainer: Trainer, module: LightningModule
) -> Callable[..., Any]:
    def call(*args: Any) -> None:
        module._current_fx_name = hook.__name__
        hook(trainer, module, *args)

    return call


def _named(hook: Callable[..., Any], module: LightningModule, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> None:
        module._current_fx_name = name
        hook(*args)

    return call
