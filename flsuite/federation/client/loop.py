"""A fast training loop for a client's fit, which calls only the hooks that are implemented.

Lightning's own loop tracks progress, results and profiles of every batch, which is slow on a small
model. In the plain case, this loop makes the same calls in the same order, and ends with the same
weights, bit for bit. In all other cases, every fit of a run uses Lightning's loop, so a fit never
depends on earlier fits of its worker.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from flsuite.common.lightning_internals import (
    HOOKS,
    enter_hook,
    hooks_with,
    scaler_of,
    set_train_loader,
    train_loader,
)


class NeedsLightningLoopError(Exception):
    """A fit that is not the plain case after all, and must restart in Lightning's loop."""


class LocalLoop:
    """One client's fit, on a Trainer that Lightning has set up.

    The plain case is one torch optimizer, stepped once per batch, without schedulers, with
    callbacks that are known to work here: flsuite's own, and others whose class sets
    ``supports_local_loop = True``. They may read the Trainer's counters, ``is_last_batch`` and
    ``train_dataloader``, change gradients and weights, and set ``should_stop``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.module = trainer.lightning_module

    def is_plain(self) -> bool:
        """Return whether this loop is equivalent to Lightning's loop."""
        # Every condition excludes a feature that the steps below do not support.
        trainer, module, precision = self.trainer, self.module, self.trainer.precision_plugin
        return (
            module.automatic_optimization
            and takes_a_batch(module)
            and len(trainer.optimizers) == 1
            and _steps_without_closure(trainer.optimizers[0])
            and not trainer.lr_scheduler_configs
            and trainer.accumulate_grad_batches == 1
            and is_every_batch(trainer.limit_train_batches)
            and not trainer.overfit_batches  # type: ignore[attr-defined]
            and not trainer.fast_dev_run  # type: ignore[attr-defined]
            and trainer.max_steps == -1
            and not trainer.min_steps
            and not trainer.min_epochs
            and isinstance(trainer.profiler, PassThroughProfiler)  # type: ignore[attr-defined]
            and type(precision) in (Precision, MixedPrecision)
            and not any(implements(module, LightningModule, name) for name in hooks_with("change"))
            and all(map(supports_local_loop, trainer.callbacks))  # type: ignore[attr-defined]
        )

    def run(self) -> None:
        """Run all epochs of the fit.

        Raises:
            NeedsLightningLoopError: If the model logs, or a hook leaves the plain case.
        """
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        loader = train_loader(trainer)
        # Callbacks may read trainer.train_dataloader, which Lightning's loop sets.
        set_train_loader(trainer, loader)
        # Once per fit, because this loop's gain is not to look up hooks at every step.
        self._hooks = {hook: bound_hooks(trainer, hook) for hook in hooks_with("steps")}

        with _logging_refused(self.module):
            self._call("on_train_start")
            progress = fit_loop.epoch_progress
            while (
                progress.current.completed < (fit_loop.max_epochs or 1) and not trainer.should_stop
            ):
                progress.increment_ready()
                self._call("on_train_epoch_start")
                self._refuse_changes()
                progress.increment_started()
                self._run_epoch(loader)
                progress.increment_processed()
                self._call("on_train_epoch_end")
                progress.increment_completed()
            self._call("on_train_end")

    def _refuse_changes(self) -> None:
        """Leave this loop if a hook has changed the Trainer in an unsupported way."""
        trainer = self.trainer
        is_changed = trainer.accumulate_grad_batches != 1 or trainer.max_steps != -1
        if is_changed or trainer.lr_scheduler_configs or len(trainer.optimizers) != 1:
            raise NeedsLightningLoopError("a hook has changed the Trainer")

    def _run_epoch(self, loader: Any) -> None:
        trainer, last = self.trainer, len(loader) - 1
        batch_progress = trainer.fit_loop.epoch_loop.batch_progress
        for index, batch in enumerate(loader):
            batch_progress.is_last_batch = index == last
            # Batches of flsuite are already on the device. A strategy call would cost more.
            is_here = self._is_on_device(batch)
            self._step(batch if is_here else trainer.strategy.batch_to_device(batch), index)
            if trainer.should_stop:
                break

    def _is_on_device(self, batch: Any) -> bool:
        device = self.trainer.strategy.root_device
        return isinstance(batch, tuple) and all(
            isinstance(part, Tensor) and part.device == device for part in batch
        )

    def _step(self, batch: Any, index: int) -> None:
        trainer, module = self.trainer, self.module
        optimizer, precision = trainer.optimizers[0], trainer.precision_plugin
        scaler = scaler_of(trainer)
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.increment_ready()
        self._call("on_train_batch_start", batch, index)

        enter_hook(module, "training_step")
        with precision.train_step_context():
            output: Any = module.training_step(batch, index)
        loss: Tensor | None = output.get("loss") if isinstance(output, dict) else output

        # In Lightning's order, zero_grad comes after the forward pass.
        self._call("on_before_zero_grad", optimizer)
        optimizer.zero_grad()
        if loss is not None:
            scaled = loss if scaler is None else scaler.scale(loss)
            self._call("on_before_backward", scaled)
            scaled.backward()
            self._call("on_after_backward")
            # Unscale before the hooks, because an algorithm's gradient term is unscaled.
            if scaler is not None:
                scaler.unscale_(optimizer)

        self._call("on_before_optimizer_step", optimizer)
        # Clip after the hooks, to include an algorithm's gradient term. A hook may have taken all
        # gradients away, and torch cannot clip an empty list by value.
        if trainer.gradient_clip_val and _has_gradients(optimizer):
            module.configure_gradient_clipping(
                optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )
        if scaler is None:
            optimizer.step()
        elif loss is not None:
            scaler.step(optimizer)  # skipped if a gradient overflows
            scaler.update()
        # These counters make up trainer.global_step.
        loop.automatic_optimization.optim_progress.optimizer.step.increment_ready()
        loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()

        extra = output if isinstance(output, dict) else {}
        outputs = {} if loss is None else {**extra, "loss": loss.detach()}
        self._call("on_train_batch_end", outputs, batch, index)
        loop.batch_progress.increment_completed()

    def _call(self, hook: str, *args: Any) -> None:
        for method in self._hooks[hook]:
            method(*args)


def bound_hooks(trainer: Trainer, hook: str) -> list[Callable[..., Any]]:
    """Return all versions of a hook in Lightning's order: callbacks first, then the model."""
    module = trainer.lightning_module
    hooks = [
        _bind(getattr(callback, hook), hook, module, trainer, module)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if implements(callback, Callback, hook)
    ]
    if implements(module, LightningModule, hook):
        hooks.append(_bind(getattr(module, hook), hook, module))
    return hooks


def implements(obj: Any, base: type, hook: str) -> bool:
    """Return whether an object has its own version of a hook, on its class or on the instance."""
    if not hasattr(base, hook):  # only models or only callbacks have it
        return False
    # A bound method has its function in __func__. A hook set on the instance does not.
    method = getattr(obj, hook)
    return getattr(method, "__func__", method) is not getattr(base, hook)


def hooks_of(module: LightningModule) -> list[str]:
    """Return the hooks and methods of a fit that a model has overridden."""
    return [name for name in HOOKS if implements(module, LightningModule, name)]


def hooks_of_callback(callback: Callback) -> list[str]:
    """Return the hooks that a callback implements."""
    names = [n for n in dir(Callback) if n.startswith("on_") or n in ("setup", "teardown")]
    return [name for name in names if implements(callback, Callback, name)]


def supports_local_loop(callback: Callback) -> bool:
    """Return whether a callback is known to work with :class:`LocalLoop`."""
    kind = type(callback)
    return kind.__module__.startswith("flsuite.") or getattr(kind, "supports_local_loop", False)


def takes_a_batch(module: LightningModule) -> bool:
    """Return whether Lightning calls ``training_step`` with a batch and its index."""
    step = module.training_step
    return is_param_in_hook_signature(step, "batch_idx", min_args=2) and not (
        is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    )


def only_optimizer(module: LightningModule) -> Any:
    """Return the optimizer that a model configures, or all that it configures if there is more."""
    configured: Any = module.configure_optimizers()
    if isinstance(configured, (list, tuple)) and len(configured) == 1:
        configured = configured[0]
    if isinstance(configured, dict) and set(configured) == {"optimizer"}:
        configured = configured["optimizer"]
    return configured


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def is_every_batch(limit: int | float | None) -> bool:
    """Return whether Lightning uses every batch: 1.0 means all of them, 1 means one batch."""
    return limit is None or (isinstance(limit, float) and limit == 1.0)


def _steps_without_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step()`` works without a closure, like all torch optimizers but LBFGS."""
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    return is_torch and not isinstance(optimizer, torch.optim.LBFGS)


def _bind(
    method: Callable[..., Any], hook: str, module: LightningModule, *first: Any
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> None:
        enter_hook(module, hook)
        method(*first, *args, **kwargs)

    return call


@contextmanager
def _logging_refused(module: LightningModule) -> Iterator[None]:
    """Raise :class:`NeedsLightningLoopError` if the model logs: this loop collects no logs."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NeedsLightningLoopError("the model logs")

    # Set on the instance, to hide the method of the class until deleted.
    module.log = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
