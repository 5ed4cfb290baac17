"""Which models, settings and algorithms can train as a stack of clients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from flsuite.aggregators.objectives.base import StatedCallback
from flsuite.aggregators.objectives.feature_term import FeatureCallback
from flsuite.aggregators.objectives.second_steps import SecondCallback
from flsuite.aggregators.rules.after_fit import AfterFit
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.lightning_internals import hooks_with
from flsuite.common.messages import Broadcast, ClientContext, FitRequest
from flsuite.federation.client.loop import (
    hooks_of,
    hooks_of_callback,
    is_every_batch,
    only_optimizer,
    takes_a_batch,
)
from flsuite.federation.client.setup import WorkerSetup
from flsuite.models.abilities import extra_epochs
from flsuite.models.layers import has_gradient_hooks

_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad)
_ONE_BY_ONE = {  # arguments of Lightning's Trainer, and the value that a stack can train with
    "accumulate_grad_batches": (None, 1),
    "max_steps": (None, -1),
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


def refuse_callbacks(request: FitRequest) -> None:
    """Refuse callbacks of the user that need a fit of their own.

    Raises:
        FlsuiteError: If there are any.
    """
    if single := [one for one in request.broadcast.callbacks if not _supports_stack(one)]:
        kind = type(single[0]).__name__
        raise FlsuiteError(
            f"Vectorized trains many clients in one step, but {kind} is a callback of a single "
            "fit; leave it out of trainer.callbacks, or set trainer.engine to Processes"
        )


@dataclass(frozen=True)
class Candidate:
    """A fit that can train in a stack.

    Attributes:
        request: The request.
        client: The client's view of the round.
        own: What the algorithm does in the client's steps, after the callbacks of the user.
        measures: Whether it measures the trained model.
    """

    request: FitRequest
    client: ClientContext
    own: list[Callback]
    measures: bool


def candidate(setup: WorkerSetup, request: FitRequest) -> Candidate | None:
    """Return a fit as it trains in a stack, or ``None`` if it does not.

    Attackers do not, nor do clients whose trained model is known.
    """
    if request.trained is not None:
        return None
    client = setup.view_of(request)
    own = [] if request.adapts else setup.callbacks_of(client)
    steps = [callback for callback in own if not isinstance(callback, AfterFit)]
    # A second model would train without their noise, and a frozen layer would get noise.
    differs = phases(steps) or any(isinstance(one, SecondCallback) for one in steps)
    clashes = differs and by_sample(request.broadcast.callbacks)
    if clashes or not _are_stackable(steps):
        return None
    return Candidate(request, client, steps, measures=len(steps) < len(own))


def by_sample(callbacks: Iterable[Callback]) -> bool:
    """Return whether a callback reads the gradient of each sample, as ``grad_sample``."""
    return any(getattr(callback, "reads_sample_gradients", False) for callback in callbacks)


def phases(callbacks: Iterable[Callback]) -> bool:
    """Return whether a callback does something else in some epochs or steps."""
    return any(
        type(one).on_train_epoch_start is not Callback.on_train_epoch_start for one in callbacks
    )


def _are_stackable(steps: Sequence[Callback]) -> bool:
    """Return whether a stack can do what an algorithm does in a client's steps.

    A callback that a stack can call has ``supports_stack = True``. In a step, it sees the gradients
    in ``on_before_optimizer_step``, but neither batches nor the forward pass. It may take gradients
    away, so that no step follows. It does the same for all clients.

    A callback with ``on_train_epoch_start`` may freeze parameters there, and sees the batch right
    before the gradients, in ``on_train_batch_start``. A callback that reads gradients by sample
    receives the number of the batch there, but not the batch. Objectives state second models and
    terms of features as functions of tensors, at most one of each.
    """
    kinds = [type(callback) for callback in steps if isinstance(callback, StatedCallback)]
    return len(set(kinds)) == len(kinds) and all(map(_supports_stack, steps))


def _supports_stack(callback: Callback) -> bool:
    """Return whether a stack can call a callback and all hooks that it implements."""
    if type(callback) in (FeatureCallback, SecondCallback):
        return True
    called = {*hooks_with("stack")}
    if phases([callback]) or by_sample([callback]):
        called.add("on_train_batch_start")
    own = {*hooks_of_callback(callback)}
    return getattr(callback, "supports_stack", False) and own <= called


def optimizer_of(model: LightningModule) -> Optimizer:
    """Return the optimizer that a model configures.

    Raises:
        FlsuiteError: If there are several, or it has a scheduler or steps of another kind.
    """
    made = only_optimizer(model)
    if type(made) in _ELEMENTWISE:
        return made
    names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
    raise FlsuiteError(
        f"Vectorized needs one optimizer without a scheduler, one of {names}; set trainer.engine "
        "to Processes"
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
    if not is_every_batch(limit := setup.trainer_kwargs.get("limit_train_batches")):
        yield f"trainer.limit_train_batches is {limit!r}"
    for argument, values in _ONE_BY_ONE.items():
        if (value := setup.trainer_kwargs.get(argument)) not in values:
            yield f"trainer.{argument} is {value!r}"
    # Attackers train by themselves.
    if not _steps_are_stackable(replace(setup, attack=None)):
        yield f"{setup.uplink.aggregator.name} does more in a client's steps than a stack can"
    try:
        optimizer = optimizer_of(model)
    except (RuntimeError, AttributeError) as error:
        yield f"{name}.configure_optimizers needs a Trainer ({one_line(error)})"
        return
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield f"the optimizer of {name} has hooks"
    if any(isinstance(value, (Optimizer, LRScheduler)) for value in vars(model).values()):
        yield f"{name} keeps its optimizer as an attribute, where a step may change it"


def _steps_are_stackable(setup: WorkerSetup) -> bool:
    """Return whether a stack can train the first client whose callbacks can be made."""
    broadcast = Broadcast(1, setup.initial, {})
    for client in range(setup.data.clients):
        with suppress(Exception):  # this client fails alone
            return candidate(setup, FitRequest(0, client, broadcast, {})) is not None
    return True


def _has_backward_hooks(part: nn.Module) -> bool:
    return bool(part._backward_hooks or part._backward_pre_hooks)


def _has_options(part: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Return whether an embedding has options that a batched program ignores."""
    return part.padding_idx is not None or bool(part.max_norm) or part.scale_grad_by_freq
