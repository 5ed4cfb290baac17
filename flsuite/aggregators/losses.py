"""The loss of a model's training step at weights that are not its own."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import loss_of
from flsuite.common.state import State
from flsuite.models.modes import PlainAttributes, evaluating


def loss_at(
    trainer: Trainer,
    module: LightningModule,
    weights: Mapping[str, Tensor],
    batch: Any,
    index: int | Tensor,
    in_full: bool = False,
    ends: dict[str, Tensor] | None = None,
    then: Callable[[Tensor], None] | None = None,
    draws: "Draws | None" = None,
) -> Tensor:
    """Return the loss of a model's training step at other weights, a scalar with gradients.

    The model does not change: a step at other weights must not count in the BatchNorm statistics,
    metrics and counters of this model. Buffers among the weights may change, as in a training step.
    The random numbers of the model's next step stay the same.

    Args:
        trainer: The Trainer of the fit, for its precision.
        module: The model.
        weights: Entries of its state dict. The others keep their own values.
        batch: A batch on the model's device.
        index: Its number in the epoch.
        in_full: Whether to compute in the precision of the weights, without autocast.
        ends: See :func:`step_loss`.
        then: See :func:`step_loss`.
        draws: The random state to draw from, as for dropout. Default: the present one.

    Raises:
        FlsuiteError: If the training step does not return a loss, DPSGD trains the model, or it
            does not have one of the weights.
    """
    if not module.automatic_optimization:
        raise FlsuiteError(
            f"this aggregator computes the loss of a training step at other weights, and "
            f"{type(module).__name__} has manual optimization; choose another aggregator"
        )
    # The hooks of Opacus see the gradients of the model's own loss alone.
    if torch.is_grad_enabled() and hasattr(module, "autograd_grad_sample_hooks"):
        raise FlsuiteError(
            "this aggregator trains at other weights, without the noise of DPSGD; choose another "
            "trainer.aggregator, or leave out DPSGD"
        )
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    # Tied weights have one name here, and functional_call gives them the same tensor.
    own = {name: weights[name] for name, _ in module.named_parameters() if name in weights}
    named = buffers | own | {name: weights[name] for name in buffers if name in weights}
    if (others := weights.keys() - named.keys()) and (strange := others - {*module.state_dict()}):
        raise FlsuiteError(
            f"this aggregator computes a loss at other weights, and {type(module).__name__} has no "
            f"{min(strange)}; give them the names of w"
        )
    precision = nullcontext() if in_full else trainer.precision_plugin.train_step_context()
    with drawing_from(module.device, draws), precision, _other_loss():
        return step_loss(module, named, batch, index, ends=ends, then=then)


_is_other: ContextVar[bool] = ContextVar("is_other_loss", default=False)


def is_other_loss() -> bool:
    """Return whether the model computes a loss of :func:`loss_at`, which is not its own."""
    return _is_other.get()


@contextmanager
def _other_loss() -> Iterator[None]:
    token = _is_other.set(True)
    try:
        yield
    finally:
        _is_other.reset(token)


def step_loss(
    module: LightningModule,
    tensors: Mapping[str, Tensor],
    batch: Any,
    index: int | Tensor,
    log: Callable[..., None] | None = None,
    ends: dict[str, Tensor] | None = None,
    then: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return the loss of a model's training step with other tensors. Its attributes stay.

    Args:
        module: The model.
        tensors: Parameters and buffers by name. Buffers change as in a training step.
        batch: A batch on the device of the tensors.
        index: Its number in the epoch. A tensor in a stack of clients.
        log: Receives what the model logs. Default: it is dropped.
        ends: Receives the buffers after the step, including any that the step has replaced.
        then: Receives the loss while the model has these tensors. A backward pass belongs here if
            layers may be computed again in it, as with activation checkpointing.

    Raises:
        FlsuiteError: If the training step does not return a loss.
    """
    with _logging_to(module, log or (lambda *args, **kwargs: None)), _unchanged(module):
        step = {f"module.{name}": value for name, value in tensors.items()}
        called = _Step(module, ends, then)
        loss: Tensor = torch.func.functional_call(called, step, (batch, index))
    return loss


def loss_and_gradient(
    trainer: Trainer,
    module: LightningModule,
    parameters: Mapping[str, Tensor],
    batch: Any,
    index: int,
    buffers: Mapping[str, Tensor] | None = None,
    in_full: bool = False,
    draws: "Draws | None" = None,
) -> tuple[Tensor, State]:
    """Return the loss of a training step at other weights, and its gradient.

    Parameters that the loss does not depend on have no gradient, as in a training step. For the
    other arguments, see :func:`loss_at`.

    Args:
        parameters: What the gradient is with respect to.
        buffers: Other entries of the state dict. Buffers among them change as in a training step.
    """
    others, ends = buffers or {}, dict[str, Tensor]()
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        # No graph of the layers that have no gradient.
        rest = {name: value.detach() for name, value in module.named_parameters()}
        at = {**rest, **others, **leaves}

        def differentiate(loss: Tensor) -> None:
            # torch.autograd.grad would not see the weights of checkpointed layers.
            if loss.requires_grad:  # a loss that reads none of them has no graph
                with torch.autocast(module.device.type, enabled=False):
                    loss.backward()

        loss = loss_at(trainer, module, at, batch, index, in_full, ends, differentiate, draws)
    # Only now, because the backward pass reads the buffers of the step.
    for name in ends.keys() & others.keys():
        others[name].copy_(ends[name].detach())
    used = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return loss.detach(), used


def mean_loss(
    trainer: Trainer, module: LightningModule, weights: State, batches: Iterable[Any]
) -> float:
    """Return the mean loss over the samples of batches, in evaluation mode.

    For the other arguments, see :func:`loss_at`.

    Args:
        batches: Batches on the model's device.
    """
    weights = {name: value.to(module.device) for name, value in weights.items()}
    total, samples = 0.0, 0
    with evaluating(module), torch.no_grad():
        for index, batch in enumerate(batches):
            size = extract_batch_size(batch)
            total += size * float(loss_at(trainer, module, weights, batch, index))
            samples += size
    return total / samples


Draws = tuple[Tensor, Tensor | None]
"""The state of torch's random generators: of the CPU, and of another device."""


def random_state(device: torch.device) -> Draws:
    """Return the state of torch's random generators."""
    if device.type == "cpu":
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


@contextmanager
def drawing_from(
    device: torch.device, state: tuple[Tensor, Tensor | None] | None
) -> Iterator[None]:
    """Draw random numbers from a state, or from the present one, and restore the present one."""
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type=device.type):
        if state is not None:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.get_device_module(device).set_rng_state(state[1], device)
        yield


class _Step(nn.Module):
    """A training step as a forward pass."""

    def __init__(
        self,
        module: LightningModule,
        ends: dict[str, Tensor] | None = None,
        then: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.ends, self.then = module, ends, then

    def forward(self, batch: Any, index: int | Tensor) -> Tensor:
        step: Any = self.module.training_step
        takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        output = step(batch, index) if takes_index else step(batch)
        if self.ends is not None:
            self.ends.update(self.module.named_buffers())
        loss = loss_of(output)
        if not isinstance(loss, Tensor):
            kind = type(self.module).__name__
            raise FlsuiteError(
                f"this aggregator computes the loss of every training step, and that of {kind} "
                f"returned {loss!r}; return a loss, or choose another aggregator"
            )
        if self.then is not None:
            self.then(loss)
        return loss


@contextmanager
def _unchanged(module: LightningModule) -> Iterator[None]:
    """Restore the model's metrics and plain Python attributes on exit."""
    kept = PlainAttributes(module)
    parents = [
        (part, name, child)
        for part in module.modules()
        for name, child in part.named_children()
        if isinstance(child, Metric)
    ]
    for parent, name, metric in parents:
        setattr(parent, name, copy.deepcopy(metric))
    try:
        yield
    finally:
        for parent, name, metric in parents:
            setattr(parent, name, metric)
        kept.restore()


@contextmanager
def _logging_to(module: LightningModule, log: Callable[..., None]) -> Iterator[None]:
    """Replace ``self.log``, which ``self.log_dict`` calls: the loss is not the model's own."""
    before = vars(module).get("log")
    module.log = log  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        if before is not None:
            module.log = before  # type: ignore[method-assign]
