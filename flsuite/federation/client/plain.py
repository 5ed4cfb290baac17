"""One client's fit as one short loop, for the plain case.

Lightning's own loop tracks progress, results and profiles of every batch, which is slow on a small
model. In the plain case, this loop makes the same calls in the same order, and ends with the same
weights, bit for bit. The plain case is one torch optimizer, stepped once per batch, without
schedulers and without Lightning callbacks of the user, see :func:`~conditions.not_plain`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.optim import Optimizer

from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import (
    HOOKS,
    attach_to_fit,
    configured,
    detects_anomalies,
    implements,
    leave_hooks,
    refuse_output,
    scaler_of,
    set_train_loader,
    step_of,
)
from flsuite.federation.client.logs import LoggedNumbers, logged_values
from flsuite.federation.client.trainer import ClientTrainer, refuse_fused

_Hooks = defaultdict[str, list[Callable[..., Any]]]
_OF_MODELS = (*HOOKS, "prepare_data", "configure_model")


class PlainLoop:
    """Fits one model, client after client.

    Args:
        trainer: Gives the settings. The model and its hooks see it as in Lightning's own loop.
        module: The model of all fits.
    """

    def __init__(self, trainer: ClientTrainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        own = [hook for hook in _OF_MODELS if implements(module, LightningModule, hook)]
        self._own = {hook: getattr(module, hook) for hook in own}

    def fit(self, loader: Any, callbacks: Sequence[Callback]) -> dict[str, float]:
        """Fit one client, and return what the model logs.

        Args:
            loader: The client's batches.
            callbacks: All callbacks, in their order.
        """
        trainer, module = self.trainer, self.module
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.training, trainer.callbacks = True, list(callbacks)  # type: ignore[attr-defined]
        trainer.strategy.connect(module)
        attach_to_fit(trainer, loader)
        self._hooks = self._hooks_with(callbacks)
        self._logged = LoggedNumbers()
        try:
            anomalies = torch.autograd.set_detect_anomaly(detects_anomalies(trainer))
            with _logging_to(module, self._log), anomalies:
                self._fit(loader)
        except BaseException as error:
            trainer.state.status = TrainerStatus.INTERRUPTED
            self._call("on_exception", error)
            raise
        leave_hooks(module)
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        return self._logged.numbers()

    def _fit(self, loader: Any) -> None:
        trainer, module = self.trainer, self.module
        self._call("prepare_data")
        self._call("setup", stage="fit")
        self._call("configure_model")
        trainer.strategy.model_to_device()
        optimizers, schedulers = configured(module)
        if len(optimizers) != 1 or schedulers:
            raise FlsuiteError(
                f"model: {type(module).__name__}.configure_optimizers returns one optimizer in one "
                "fit and more in another; return the same kind in each"
            )
        trainer.strategy.optimizers = optimizers
        if scaler_of(trainer) is not None:
            refuse_fused(optimizers)
        self._call("on_fit_start")
        set_train_loader(trainer, loader)
        self._call("on_train_start")
        self._run_epochs(loader, _Step(trainer, module, self._hooks))
        self._call("on_train_end")
        self._call("on_fit_end")
        self._call("teardown", stage="fit")

    def _run_epochs(self, loader: Any, step: "_Step") -> None:
        trainer = self.trainer
        epochs, batches = (
            trainer.fit_loop.epoch_progress,
            trainer.fit_loop.epoch_loop.batch_progress,
        )
        device, last = trainer.strategy.root_device, len(loader) - 1
        for _ in range(trainer.fit_loop.max_epochs or 1):
            epochs.increment_ready()
            self._call("on_train_epoch_start")
            epochs.increment_started()
            self._logged.begin_epoch()
            for index, batch in enumerate(loader):
                batches.is_last_batch = index == last
                # Batches of flsuite are already on the device. A call would cost more.
                if not _is_on(batch, device):
                    batch = move_data_to_device(batch, device)
                self._batch = batch
                step.take(batch, index)
                if trainer.should_stop:
                    break
            epochs.increment_processed()
            self._call("on_train_epoch_end")
            epochs.increment_completed()
            if trainer.should_stop:
                break

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """Take what the model logs, in place of its ``self.log``."""
        size = extract_batch_size(self._batch)
        for name, value, is_of_step in logged_values(size, *args, **kwargs):
            self._logged.add(name, value, size, is_of_step)

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for method in self._hooks.get(hook, ()):
            method(*args, **kwargs)

    def _hooks_with(self, callbacks: Sequence[Callback]) -> _Hooks:
        """Return the hooks of all callbacks and of the model, in the order of Lightning."""
        hooks = _Hooks(list)
        for callback in callbacks:
            for hook in _hooks_of_kind(type(callback)):  # type: ignore[arg-type]
                method = partial(getattr(callback, hook), self.trainer, self.module)
                hooks[hook].append(method)
        for hook, own in self._own.items():
            hooks[hook].append(own)
        return hooks


class _Step:
    """Takes the steps of one fit.

    Args:
        trainer: The Trainer, with the optimizer of the fit.
        module: The model.
        hooks: The hooks of callbacks and of the model.
    """

    def __init__(self, trainer: ClientTrainer, module: LightningModule, hooks: _Hooks) -> None:
        self._trainer, self._module, self._hooks = trainer, module, hooks
        self._optimizer = optimizer = trainer.optimizers[0]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._has_own_zero = type(optimizer).zero_grad is not Optimizer.zero_grad
        self._take_step, self._scaler = step_of(optimizer), scaler_of(trainer)
        plugin = trainer.precision_plugin
        is_mixed = type(plugin) is MixedPrecision
        self._precision: Any = plugin.train_step_context if is_mixed else nullcontext
        self._batches = trainer.fit_loop.epoch_loop.batch_progress
        done = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._steps = done.optimizer.step  # trainer.global_step

    def take(self, batch: Any, index: int) -> None:
        """Take a step on a batch."""
        hooks, optimizer = self._hooks, self._optimizer
        self._batches.increment_ready()
        for hook in hooks["on_train_batch_start"]:  # a function would cost more than most hooks
            hook(batch, index)
        with self._precision():
            output = self._module.training_step(batch, index)
        outputs: dict[str, Any] = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss: Tensor | None = outputs.get("loss")
        if output is not None and not isinstance(loss, Tensor):
            refuse_output(output)

        # In Lightning's order, gradients are cleared after the forward pass.
        for hook in hooks["on_before_zero_grad"]:
            hook(optimizer)
        self._clear()
        if loss is not None:
            self._backward(loss)
            outputs["loss"] = loss.detach()
        for hook in hooks["on_before_optimizer_step"]:
            hook(optimizer)
        self._update(has_loss=loss is not None)
        self._steps.increment_ready()
        self._steps.increment_completed()
        for hook in hooks["on_train_batch_end"]:
            hook(outputs if loss is not None else {}, batch, index)
        self._batches.increment_completed()

    def _clear(self) -> None:
        """Clear the gradients."""
        if self._has_own_zero:
            self._optimizer.zero_grad()
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def _backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        for hook in self._hooks["on_before_backward"]:
            hook(scaled)
        scaled.backward()
        for hook in self._hooks["on_after_backward"]:
            hook()
        # Unscale first, because an algorithm's gradient term is unscaled.
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)

    def _update(self, has_loss: bool) -> None:
        """Clip the gradients and step the optimizer."""
        trainer, optimizer = self._trainer, self._optimizer
        if trainer.gradient_clip_val:  # here, to include an algorithm's gradient term
            self._module.configure_gradient_clipping(
                optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )
        if self._scaler is None:
            self._take_step()
        elif has_loss:
            self._scaler.step(optimizer)  # skipped if a gradient overflows
            self._scaler.update()


@cache
def _hooks_of_kind(kind: type[Callback]) -> list[str]:
    """Return the hooks that a class of callbacks has."""
    return [hook for hook in HOOKS if implements(kind, Callback, hook)]


def _is_on(batch: Any, device: torch.device) -> bool:
    """Return whether a batch is a tuple of tensors on a device."""
    if not isinstance(batch, tuple):
        return False
    return all(isinstance(part, Tensor) and part.device == device for part in batch)


@contextmanager
def _logging_to(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Call a function with what the model logs. This hides the method of its class."""
    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]
