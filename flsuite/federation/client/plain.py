"""One client's fit as one short loop, for the plain case.

Lightning's own loop tracks progress, results and profiles of every batch, which is slow on a small
model. In the plain case, this loop makes the same calls in the same order, and ends with the same
weights, bit for bit. The plain case is one torch optimizer, stepped once per batch, without
schedulers and without Lightning callbacks of the user.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from flsuite.aggregators.losses import step_loss
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import (
    HOOKS,
    attach_to_fit,
    attached,
    configured,
    detects_anomalies,
    hooks_with,
    leave_hooks,
    scaler_of,
    set_train_loader,
    step_of,
)
from flsuite.data.federated import unchanged
from flsuite.federation.client.callbacks import FitOptimizers, FitRecord, SampleGradients
from flsuite.federation.client.hooks import hooks_of_callback, implements, takes_a_batch
from flsuite.federation.client.logs import LoggedNumbers, OtherMeanError
from flsuite.federation.client.trainer import ClientTrainer, refuse_fused
from flsuite.models.abilities import extra_epochs

_PLAIN = {  # arguments of Lightning's Trainer, and their values in the plain case
    "accumulate_grad_batches": (None, 1),
    "limit_train_batches": (None, 1.0),
    "overfit_batches": (None, 0.0),
    "fast_dev_run": (None, False),
    "max_steps": (None, -1),
    "min_steps": (None, 0),
    "min_epochs": (None, 0),
}


def not_plain(
    trainer: ClientTrainer,
    module: LightningModule,
    callbacks: Iterable[Callback],
    loader: Iterable[Any],
) -> str | None:
    """Return why clients need Lightning's loop, or ``None`` if the short loop does the same.

    A step of a copy of the model shows what it logs.

    Args:
        trainer: The Trainer.
        module: The model.
        callbacks: The users' callbacks.
        loader: The batches of one client.
    """
    name = type(module).__name__
    if not module.automatic_optimization or not takes_a_batch(module):
        return f"{name} has manual optimization, or a training_step without (batch, batch_idx)"
    for callback in callbacks:
        if not isinstance(callback, SampleGradients) and (own := hooks_of_callback(callback)):
            return f"{type(callback).__name__} has {own[0]}"
    if own := [hook for hook in hooks_with("change") if implements(module, LightningModule, hook)]:
        return f"{name} has {own[0]}"
    if not type(module).configure_callbacks.__module__.startswith(("flsuite.", "lightning.")):
        return f"{name} has configure_callbacks"
    for argument, values in _PLAIN.items():
        value = trainer.given.get(argument)
        # 1 is one batch, and 1.0 all of them.
        if value not in values or type(value) not in map(type, values):
            return f"trainer.{argument} is {value!r}"
    if type(trainer.precision_plugin) not in (Precision, MixedPrecision):
        return f"trainer.precision is {trainer.precision}"
    if not isinstance(trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
        return "trainer.profiler is set"
    return _shown_by_a_copy(trainer, module, loader)


def _shown_by_a_copy(
    trainer: ClientTrainer, module: LightningModule, loader: Iterable[Any]
) -> str | None:
    """Return what a step of a copy of the model shows to be out of the plain case."""
    trial, shown = copy.deepcopy(module), copy.copy(loader)
    vars(shown)["change"] = unchanged  # an attacker's draws belong to its fit
    with attached(trial, trainer), torch.random.fork_rng(), suppress(Exception):
        optimizers, schedulers = configured(trial)
        if len(optimizers) != 1 or schedulers or not _steps_without_closure(optimizers[0]):
            return f"{type(module).__name__} has another optimizer than one, or a scheduler"
        trial.to(trainer.strategy.root_device)
        batch = move_data_to_device(next(iter(shown)), trainer.strategy.root_device)
        tensors = {**dict(trial.named_parameters()), **dict(trial.named_buffers())}
        with trainer.precision_plugin.train_step_context():
            try:
                step_loss(trial, tensors, batch, 0, LoggedNumbers(lambda: batch).log)
            except OtherMeanError as error:
                return str(error)
    return None  # an error of the model shows in its fit


class PlainLoop:
    """Fits one model, client after client.

    Args:
        trainer: Gives the settings. The model and its hooks see it as in Lightning's own loop.
        module: The model of all fits.
    """

    def __init__(self, trainer: ClientTrainer, module: LightningModule) -> None:
        self.trainer, self.module = trainer, module
        names = *HOOKS, "prepare_data", "configure_model"
        self._own = {hook: self._of_module(hook) for hook in names}
        self._is_mixed = type(trainer.precision_plugin) is MixedPrecision

    def fit(
        self,
        loader: Any,
        callbacks: list[Any],
        optimizers: FitOptimizers,
        record: FitRecord,
    ) -> dict[str, float]:
        """Fit one client, and return what the model logs.

        Args:
            loader: The client's batches.
            callbacks: The users' callbacks.
            optimizers: Prepares and keeps the optimizers.
            record: Records the losses, and lets the algorithm change the steps.
        """
        trainer, module = self.trainer, self.module
        trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
        trainer.training, trainer.callbacks = True, [*callbacks, record]  # type: ignore[attr-defined]
        trainer.strategy.connect(module)
        attach_to_fit(trainer, loader)
        self._hooks = {
            hook: [*self._of(callbacks, hook), *own] if callbacks else own
            for hook, own in self._own.items()
        }
        logged = LoggedNumbers(lambda: self._batch)
        try:
            anomalies = torch.autograd.set_detect_anomaly(detects_anomalies(trainer))
            with _logging_to(module, logged), anomalies:
                self._fit(loader, optimizers, record, logged)
        except BaseException as error:
            trainer.state.status = TrainerStatus.INTERRUPTED
            self._call("on_exception", error)
            record.on_exception(trainer)
            raise
        leave_hooks(module)
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        return logged.numbers()

    def _fit(
        self, loader: Any, optimizers: FitOptimizers, record: FitRecord, logged: LoggedNumbers
    ) -> None:
        trainer, module = self.trainer, self.module
        self._call("prepare_data")
        self._call("setup", stage="fit")
        self._call("configure_model")
        trainer.strategy.model_to_device()
        configuration = configured(module)
        if len(configuration[0]) != 1 or configuration[1]:
            raise FlsuiteError(
                f"model: {type(module).__name__}.configure_optimizers returns one optimizer in one "
                "fit and more in another; return the same kind in each"
            )
        trainer.strategy.optimizers = configuration[0]
        if scaler_of(trainer) is not None:
            refuse_fused(configuration[0])
        optimizers.on_fit_start(trainer, module)
        self._call("on_fit_start")
        self._train(loader, optimizers, record, logged)
        self._call("on_fit_end")
        optimizers.on_fit_end(trainer, module)
        self._call("teardown", stage="fit")

    def _train(
        self, loader: Any, optimizers: FitOptimizers, record: FitRecord, logged: LoggedNumbers
    ) -> None:
        """Run all epochs."""
        trainer, module = self.trainer, self.module
        set_train_loader(trainer, loader)
        optimizers.on_train_start(trainer, module)
        self._call("on_train_start")
        record.on_train_start(trainer, module)

        step, warmup = self._step_of(trainer.optimizers[0], record), extra_epochs(module)
        progress = trainer.fit_loop.epoch_progress
        for epoch in range(trainer.fit_loop.max_epochs or 1):
            progress.increment_ready()
            self._call("on_train_epoch_start")
            record.on_train_epoch_start(trainer, module)
            progress.increment_started()
            logged.begin_epoch()
            self._run_epoch(loader, step, is_warmup=epoch < warmup)
            progress.increment_processed()
            self._call("on_train_epoch_end")
            progress.increment_completed()
            if trainer.should_stop:
                break
        self._call("on_train_end")
        record.on_train_end(trainer, module)

    def _run_epoch(
        self, loader: Any, step: Callable[[Any, int, bool], None], is_warmup: bool
    ) -> None:
        trainer, last = self.trainer, len(loader) - 1
        progress = trainer.fit_loop.epoch_loop.batch_progress
        device = trainer.strategy.root_device
        for index, batch in enumerate(loader):
            progress.is_last_batch = index == last
            # Batches of flsuite are already on the device. A call would cost more.
            if not _is_on(batch, device):
                batch = move_data_to_device(batch, device)
            self._batch = batch
            step(batch, index, is_warmup)
            if trainer.should_stop:
                break

    def _step_of(self, optimizer: Optimizer, record: FitRecord) -> Callable[[Any, int, bool], None]:
        """Return the function that takes one step."""
        trainer, module, hooks = self.trainer, self.module, self._hooks
        scaler = scaler_of(trainer)
        training_step: Any = module.training_step
        context = trainer.precision_plugin.train_step_context if self._is_mixed else nullcontext
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        is_own_zero = type(optimizer).zero_grad is not Optimizer.zero_grad
        take_step, clips = step_of(optimizer), bool(trainer.gradient_clip_val)
        batches = trainer.fit_loop.epoch_loop.batch_progress
        steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        hooks_around = {name: hooks[name] for name in hooks_with("steps") if hooks[name]}

        def call(hook: str, *args: Any) -> None:
            for method in hooks_around.get(hook, ()):
                method(*args)

        def step(batch: Any, index: int, is_warmup: bool) -> None:
            batches.increment_ready()
            call("on_train_batch_start", batch, index)
            if record.steps:
                record.steps.begin_step(batch, index)
            with context():
                output = training_step(batch, index)
            loss: Tensor | None = output.get("loss") if isinstance(output, dict) else output

            # In Lightning's order, gradients are cleared after the forward pass.
            call("on_before_zero_grad", optimizer)
            if is_own_zero:
                optimizer.zero_grad()
            else:
                for parameter in parameters:
                    parameter.grad = None
            if loss is not None:
                scaled = loss if scaler is None else scaler.scale(loss)
                call("on_before_backward", scaled)
                scaled.backward()
                call("on_after_backward")
                # Unscale first, because an algorithm's gradient term is unscaled.
                if scaler is not None:
                    scaler.unscale_(optimizer)

            call("on_before_optimizer_step", optimizer)
            if record.steps or scaler is not None:
                record.on_before_optimizer_step(trainer, module, optimizer)
            # Clip afterwards, to include an algorithm's gradient term. A hook may have taken all
            # gradients away, and torch cannot clip an empty list by value.
            if clips and any(parameter.grad is not None for parameter in parameters):
                module.configure_gradient_clipping(
                    optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )
            if scaler is None:
                take_step()
            elif loss is not None:
                scaler.step(optimizer)  # skipped if a gradient overflows
                scaler.update()
            steps.increment_ready()
            steps.increment_completed()  # trainer.global_step

            if hooks_around:
                extra = output if isinstance(output, dict) else {}
                outputs = {} if loss is None else {**extra, "loss": loss.detach()}
                call("on_train_batch_end", outputs, batch, index)
            if record.steps:
                record.steps.end_step()
            if loss is not None:
                record.add(loss.detach(), is_warmup)
            batches.increment_completed()

        return step

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        for method in self._hooks.get(hook, ()):
            method(*args, **kwargs)

    def _of_module(self, hook: str) -> list[Callable[..., Any]]:
        """Return the model's version of a hook, if it has one."""
        has_own = implements(self.module, LightningModule, hook)
        return [getattr(self.module, hook)] if has_own else []

    def _of(self, callbacks: Iterable[Callback], hook: str) -> list[Callable[..., Any]]:
        """Return the callbacks' versions of a hook."""

        def bound(method: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: method(self.trainer, self.module, *args, **kwargs)

        has = [one for one in callbacks if implements(one, Callback, hook)]
        return [bound(getattr(one, hook)) for one in has]


def _is_on(batch: Any, device: torch.device) -> bool:
    """Return whether a batch is a tuple of tensors on a device."""
    if not isinstance(batch, tuple):
        return False
    return all(isinstance(part, Tensor) and part.device == device for part in batch)


def _steps_without_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` works without a closure, like all torch optimizers but LBFGS."""
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    return is_torch and not isinstance(optimizer, LBFGS)


@contextmanager
def _logging_to(module: LightningModule, logged: LoggedNumbers) -> Iterator[None]:
    """Collect what the model logs. This hides the method of its class."""
    vars(module)["log"] = logged.log
    try:
        yield
    finally:
        del vars(module)["log"]
