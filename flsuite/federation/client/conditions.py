"""Which models and settings train in the short loop, and which as a stack of clients."""

import copy
from bdb import BdbQuit
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from flsuite.aggregators.losses import step_loss
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.lightning_internals import (
    attached,
    configured,
    hooks_of,
    hooks_of_callback,
    hooks_with,
    implements,
    takes_a_batch,
)
from flsuite.data.federated import unchanged
from flsuite.federation.client.callbacks import SampleGradients
from flsuite.federation.client.logs import OtherMeanError, logged_values
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.client.trainer import ClientTrainer
from flsuite.models.abilities import extra_epochs
from flsuite.models.layers import has_gradient_hooks

# Arguments of Lightning's Trainer, and the values that do not change the steps.
_IN_BOTH = {
    "accumulate_grad_batches": (None, 1),
    "overfit_batches": (None, 0, 0.0),
    "fast_dev_run": (None, False),
    "min_steps": (None, 0),
    "min_epochs": (None, 0),
}
_IN_THE_SHORT_LOOP = {
    **_IN_BOTH,
    "limit_train_batches": (None, 1.0),
    "max_steps": (None, -1),
}
_IN_A_STACK = {
    **_IN_BOTH,
    "precision": (None, "32-true", "32", 32, "bf16-mixed", "bf16"),
    "plugins": (None,),
    "profiler": (None,),
}
_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)


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
    if reason := next(_reasons_of_both(module, trainer.given, _IN_THE_SHORT_LOOP), None):
        return reason
    if reason := hook_beyond((), callbacks):
        return reason
    name = type(module).__name__
    if own := [hook for hook in hooks_with("change") if implements(module, LightningModule, hook)]:
        return f"{name} has {own[0]}"
    if not type(module).configure_callbacks.__module__.startswith(("flsuite.", "lightning.")):
        return f"{name} has configure_callbacks"
    if type(trainer.precision_plugin) not in (Precision, MixedPrecision):
        return f"trainer.precision is {trainer.precision}"
    if not isinstance(trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
        return "trainer.profiler is set"
    return _shown_by_a_copy(trainer, module, loader)


def require_stackable(setup: WorkerSetup) -> None:
    """Refuse a run whose clients can only train one by one.

    Raises:
        FlsuiteError: If it is one. The message names the reason.
    """
    if reason := next(_not_stackable(setup), None):
        raise FlsuiteError(
            f"Vectorized cannot train clients as one batched program: {reason}; set "
            "trainer.engine to Processes"
        )


def hook_beyond(called: Collection[str], callbacks: Iterable[Callback]) -> str | None:
    """Return the first hook of users' callbacks that is not among those called, or ``None``.

    Callbacks that compute gradients from the gradients of the samples train in any way.
    """
    for callback in callbacks:
        others = [name for name in hooks_of_callback(callback) if name not in called]
        if others and not isinstance(callback, SampleGradients):
            return f"{type(callback).__name__} has {others[0]}"
    return None


def by_sample(callbacks: Iterable[Callback]) -> list[SampleGradients]:
    """Return the callbacks that compute a gradient from the gradients of the samples."""
    return [one for one in callbacks if isinstance(one, SampleGradients)]


def optimizer_of(model: LightningModule) -> tuple[Optimizer, list[Any]]:
    """Return the optimizer that a model configures, and its schedulers as Lightning runs them.

    Raises:
        FlsuiteError: If there are several optimizers, or one with steps of another kind.
    """
    optimizers, schedulers = configured(model)
    if any(one.reduce_on_plateau for one in schedulers):
        raise FlsuiteError(
            f"Vectorized cannot step {type(schedulers[0].scheduler).__name__}, which reads a score "
            "of one client; set trainer.engine to Processes"
        )
    if len(optimizers) == 1 and type(optimizers[0]) in _ELEMENTWISE:
        return optimizers[0], schedulers
    names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
    raise FlsuiteError(
        f"Vectorized needs one optimizer, one of {names}; set trainer.engine to Processes"
    )


def _reasons_of_both(
    model: LightningModule, given: Mapping[str, Any], settings: Mapping[str, tuple[Any, ...]]
) -> Iterator[str]:
    """Yield why neither the short loop nor a stack can train a model.

    Args:
        model: The model.
        given: The arguments of the Trainer.
        settings: The values that they may have.
    """
    if not model.automatic_optimization or not takes_a_batch(model):
        name = type(model).__name__
        yield f"{name} has manual optimization, or a training_step without (batch, batch_idx)"
    for argument, values in settings.items():
        value = given.get(argument)
        # 1 is one batch, and 1.0 all of them.
        if value not in values or type(value) not in map(type, values):
            yield f"trainer.{argument} is {value!r}"


def _not_stackable(setup: WorkerSetup) -> Iterator[str]:
    """Yield why a run cannot be stacked."""
    model, name = setup.model, type(setup.model).__name__
    yield from _reasons_of_both(model, setup.trainer_kwargs, _IN_A_STACK)
    if extra_epochs(model):
        yield f"{name} has a warm-up"
    if own := hooks_of(model):
        yield f"{name} has {own[0]}"
    if any(p.is_sparse or p.is_complex() for p in model.parameters()):
        yield f"{name} has sparse or complex parameters"
    for path, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and _has_options(part):
            yield f"{name}.{path} has padding_idx, max_norm or scale_grad_by_freq"
    if has_gradient_hooks(model) or any(map(_has_backward_hooks, model.modules())):
        yield f"{name} has hooks on gradients"
    try:
        optimizer, schedulers = optimizer_of(model)
    except (RuntimeError, AttributeError) as error:
        yield f"{name}.configure_optimizers needs a Trainer ({one_line(error)})"
        return
    if schedulers and setup.lr_decay:
        yield f"trainer.lr_decay and the scheduler of {name} would both set the learning rate"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield f"the optimizer of {name} has hooks"
    if any(isinstance(value, Optimizer | LRScheduler) for value in vars(model).values()):
        yield f"{name} keeps its optimizer as an attribute, where a step may change it"


def _shown_by_a_copy(
    trainer: ClientTrainer, module: LightningModule, loader: Iterable[Any]
) -> str | None:
    """Return what a step of a copy of the model shows to be out of the plain case."""

    def log(*args: Any, **kwargs: Any) -> None:
        logged_values(extract_batch_size(batch), *args, **kwargs)

    trial, shown = copy.deepcopy(module), copy.copy(loader)
    vars(shown)["change"] = unchanged  # an attacker's draws belong to its fit
    with attached(trial, trainer), torch.random.fork_rng(), _shown_in_the_fit():
        optimizers, schedulers = configured(trial)
        if len(optimizers) != 1 or schedulers or not _steps_without_closure(optimizers[0]):
            return f"{type(module).__name__} has another optimizer than one, or a scheduler"
        trial.to(trainer.strategy.root_device)
        batch = move_data_to_device(next(iter(shown)), trainer.strategy.root_device)
        tensors = {**dict(trial.named_parameters()), **dict(trial.named_buffers())}
        with trainer.precision_plugin.train_step_context():
            try:
                step_loss(trial, tensors, batch, 0, log)
            except OtherMeanError as error:
                return str(error)
    return None


@contextmanager
def _shown_in_the_fit() -> Iterator[None]:
    """Ignore errors of the model, which its fit shows, but not a user who leaves the debugger."""
    try:
        yield
    except BdbQuit:
        raise
    except Exception:
        pass


def _steps_without_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` works without a closure, like all torch optimizers but LBFGS."""
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    return is_torch and not isinstance(optimizer, LBFGS)


def _has_backward_hooks(part: nn.Module) -> bool:
    return bool(part._backward_hooks or part._backward_pre_hooks)


def _has_options(part: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Return whether an embedding has options that a batched program ignores."""
    return part.padding_idx is not None or bool(part.max_norm) or part.scale_grad_by_freq
