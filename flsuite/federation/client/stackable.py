"""Which models and settings can train as a stack of clients."""

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.lightning_internals import configured, hooks_with
from flsuite.federation.client.callbacks import SampleGradients
from flsuite.federation.client.hooks import hooks_of, hooks_of_callback, takes_a_batch
from flsuite.federation.client.setup import WorkerSetup
from flsuite.models.abilities import extra_epochs
from flsuite.models.layers import has_gradient_hooks

_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
_ONE_BY_ONE = {  # arguments of Lightning's Trainer, and the value that a stack can train with
    "accumulate_grad_batches": (None, 1),
    "min_steps": (None, 0),
    "min_epochs": (None, 0),
    "overfit_batches": (None, 0.0),
    "fast_dev_run": (None, False),
    "precision": (None, "32-true", "32", 32, "bf16-mixed", "bf16"),
    "plugins": (None,),
}


def require_stackable(setup: WorkerSetup) -> None:
    """Refuse a run whose clients can only train one by one.

    Raises:
        FlsuiteError: If it is one. The message names the reason.
    """
    if reason := next(_reasons(setup), None):
        raise FlsuiteError(
            f"Vectorized cannot train clients as one batched program: {reason}; set "
            "trainer.engine to Processes"
        )


def single(callbacks: Iterable[Callback]) -> str | None:
    """Return the first hook of users' callbacks that only a fit of one client calls, or ``None``.

    A stack calls what starts, ends or leaves a fit, for each client.
    """
    called = {*hooks_with("stack")}
    for callback in callbacks:
        others = [name for name in hooks_of_callback(callback) if name not in called]
        if others and not isinstance(callback, SampleGradients):
            return f"{type(callback).__name__}.{others[0]}"
    return None


def by_sample(callbacks: Iterable[Callback]) -> list[SampleGradients]:
    """Return the callbacks that compute gradients from those of the samples."""
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


def _reasons(setup: WorkerSetup) -> Iterator[str]:
    """Yield why a run cannot be stacked."""
    model, name = setup.model, type(setup.model).__name__
    if not model.automatic_optimization or not takes_a_batch(model):
        yield f"{name} has manual optimization, or a training_step without (batch, batch_idx)"
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
    for argument, values in _ONE_BY_ONE.items():
        if (value := setup.trainer_kwargs.get(argument)) not in values:
            yield f"trainer.{argument} is {value!r}"
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


def _has_backward_hooks(part: nn.Module) -> bool:
    return bool(part._backward_hooks or part._backward_pre_hooks)


def _has_options(part: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Return whether an embedding has options that a batched program ignores."""
    return part.padding_idx is not None or bool(part.max_norm) or part.scale_grad_by_freq
