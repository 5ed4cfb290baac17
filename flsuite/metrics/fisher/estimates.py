"""Fisher information by whole matrices, columns and samples.

The scalars per sample, whose squared gradients sum to the Fisher of a prediction, depend on the
task. With z the logits and p the predicted probabilities, held constant:

- classes: ``sqrt(p_c) log_softmax(z)_c``, whose gradient at z is ``sqrt(p_c) (e_c - p)``;
- labels: ``sqrt(p_c (1 - p_c)) z_c``;
- the squared loss ``sum_c (z_c - y_c)^2 / 2``, of the task ``other``: ``z_c``.

Only the gradients at z are computed. They are finite for any finite z.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from flsuite.common.errors import FlsuiteError, one_line, require_one_of
from flsuite.common.state import State
from flsuite.data.federated import Task
from flsuite.models import modes


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Compute in evaluation mode and float32, with gradients.

    The modes and the random generators are restored on exit.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    float32 = torch.autocast(device.type, enabled=False)
    # isolate_rng, because the pass must not affect later random draws.
    with modes.evaluating(module), isolate_rng(), torch.enable_grad(), float32:
        yield


# With fewer channels, channels_last is slower on a CPU: it does not fill a vector.
_NARROW = 16


@contextmanager
def fast_formats(module: nn.Module) -> Iterator[None]:
    """Hold the weights of convolutions with few input channels in contiguous format in the block.

    In channels_last, the input gradient of such a layer takes twice as long on a CPU.
    """
    kept = {
        layer.weight: layer.weight.data
        for layer in module.modules()
        if isinstance(layer, nn.Conv2d)
        and layer.weight.shape[1] < _NARROW
        and layer.weight.device.type == "cpu"
    }
    try:
        for weight, value in kept.items():
            # Not contiguous(), because with one channel a tensor counts as being in both formats.
            weight.data = value.clone(memory_format=torch.contiguous_format)
        yield
    finally:
        for weight, value in kept.items():
            weight.data = value


Batch = tuple[Tensor, ...]


class Outputs(nn.Module):
    """A model's numbers for a batch, as a forward pass for torch.func.

    Args:
        model: A :class:`~flsuite.models.abilities.LogitModel` or
            :class:`~flsuite.models.abilities.LikelihoodModel`, or a module whose forward pass
            returns logits.
        name: ``logits``, which are ``(n, outputs)``, or ``log_likelihood``, which is ``(n,)``.
    """

    def __init__(
        self, model: nn.Module, name: Literal["logits", "log_likelihood"] = "logits"
    ) -> None:
        super().__init__()
        self.model, self.name = model, name
        self.owner = f"the {name} of {type(model).__name__}"

    def forward(self, batch: Batch) -> Tensor:
        samples, is_row = len(batch[0]), self.name == "logits"
        values: Tensor = getattr(self.model, self.name, self.model)(batch[0] if is_row else batch)
        shape = getattr(values, "shape", None)
        got = type(values).__name__ if shape is None else tuple(shape)
        if len(got) != 1 + is_row or got[0] != samples:
            wanted = "row per sample, ({}, outputs)" if is_row else "number per sample, ({},)"
            raise FlsuiteError(f"{self.owner} must have one {wanted.format(samples)}, got {got}")
        return values

    def independent(self) -> FlsuiteError:
        """Return the error of numbers that do not depend on the chosen parameters."""
        return FlsuiteError(
            f"{self.owner} depend on none of the parameters whose Fisher is requested; compute "
            "them from these, with gradients"
        )


# Elements of per-sample gradients at a time, 64 MiB. More would far exceed the cache and be slower.
_NUMBERS_AT_ONCE = 2**24


def sample_squares(
    outputs: Outputs, parameters: State, batch: Batch, columns: Tensor
) -> Iterator[State]:
    """Yield sums over samples and columns of squared gradients, for a few samples at a time.

    Args:
        outputs: The model's :class:`Outputs`.
        parameters: Detached parameters of the model under ``outputs``, by name.
        batch: Tensors with one row per sample.
        columns: Gradients at the outputs, ``(columns, n, ...)``.
    """

    def of_one(pullback: Any, columns: Tensor) -> State:
        total: State = {}
        for column in columns:
            (gradient,) = pullback(column)
            total = {k: g.square() + total[k] if total else g.square() for k, g in gradient.items()}
        return total

    for squares in _by_vmap(of_one, 1, outputs, parameters, batch, columns):
        yield {name: square.sum(0) for name, square in squares.items()}


def _by_vmap(
    of_one: Any, kept: int, outputs: Outputs, parameters: State, batch: Batch, columns: Tensor
) -> Iterator[State]:
    """Yield ``of_one`` for chunks of samples. It keeps ``kept`` gradients per sample."""

    def of_sample(parameters: State, columns: Tensor, *sample: Tensor) -> State:
        def forward(parameters: Mapping[str, Tensor]) -> Tensor:
            named = {f"model.{name}": value for name, value in parameters.items()}
            return functional_call(outputs, named, (tuple(part[None] for part in sample),))[0]

        return of_one(vjp(forward, parameters)[1], columns)

    per_sample = vmap(of_sample, in_dims=(None, 1, *(0 for _ in batch)), randomness="different")
    numbers = kept * sum(p.numel() for p in parameters.values())
    at_once = max(1, _NUMBERS_AT_ONCE // max(numbers, 1))

    splits = [part.split(at_once) for part in batch]
    for at, *chunk in zip(columns.split(at_once, 1), *splits, strict=True):
        try:
            yield per_sample(parameters, at, *chunk)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a whole batch worked before, so vectorization is the cause
            is_row = outputs.name == "logits"
            otherwise = "" if is_row else ", or set the Fisher's estimator to batch"
            raise FlsuiteError(
                f"{outputs.owner} cannot be vectorized over samples "
                f"({one_line(error, longest=200)}); write the method without in-place operations "
                f"and .item(){otherwise}"
            ) from error


Expectation = Literal["exact", "sampled"]
"""``exact`` has one column per output. ``sampled`` has one column, for a target drawn from the
prediction. Its squares have the same expectation."""


def columns(
    logits: Tensor,
    task: Task,
    expectation: Expectation,
    generator: torch.Generator | None,
) -> Tensor:
    """Return the gradients of the scalars at the logits, ``(columns, n, outputs)``.

    Args:
        logits: ``(n, outputs)``.
        task: The kind of prediction. ``other`` is taken as a regression with the squared loss.
        expectation: Over all outputs, or for one target per sample drawn from the prediction.
        generator: Random generator of the targets, on the CPU. Default: torch's own.
    """
    owner = "the Fisher of a prediction"
    require_one_of(owner, get_args(Task), task=task)
    require_one_of(owner, get_args(Expectation), expectation=expectation)
    z = logits.detach()
    if expectation == "sampled":
        return _sampled(z, task, generator)[None]

    identity = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)[:, None]
    if task == "other":
        return identity.expand(-1, len(z), -1)
    if task == "multilabel":
        return (z.sigmoid() * (-z).sigmoid()).sqrt() * identity
    p = z.softmax(1)
    return p.sqrt().T[..., None] * (identity - p)


def _sampled(z: Tensor, task: Task, generator: torch.Generator | None) -> Tensor:
    """Return the gradient at z of the log-likelihood of a target drawn from the prediction."""
    if task == "other":
        return torch.randn(z.shape, generator=generator).to(z)
    if task == "multilabel":
        p = z.sigmoid()
        return (torch.rand(z.shape, generator=generator).to(z) < p).to(z.dtype) - p

    p = z.softmax(1)
    # Invert the CDF, because torch.multinomial would raise on a diverged model. The server reports
    # its NaN with the client's number.
    uniform = torch.rand((len(z), 1), generator=generator).to(z)
    label = (p.cumsum(1) <= uniform).sum(1).clamp(max=z.shape[1] - 1)
    return nn.functional.one_hot(label, z.shape[1]).to(z.dtype) - p


def full_fisher(
    module: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    task: Task,
    expectation: Expectation = "exact",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the Fisher ``(d, d)`` of the parameters ``names``, flattened in that order.

    It has the dtype of the parameters, is summed in float64, and is zero for frozen ones. The model
    runs in its current
    state, as in :func:`~flsuite.metrics.fisher.forms.predictive_diagonal`, which has the same
    arguments.
    """
    logits = Outputs(module)
    parameters = {name: module.get_parameter(name) for name in names}
    trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
    size, like = sum(p.numel() for p in parameters.values()), parameters[names[0]]
    total, samples = torch.zeros(size, size, dtype=torch.float64, device=like.device), 0

    def of_one(pullback: Any, columns: Tensor) -> State:
        gradients = [pullback(column)[0] for column in columns]
        return {name: torch.stack([gradient[name] for gradient in gradients]) for name in trained}

    for batch in batches:
        with torch.no_grad():
            at = columns(logits(batch[:1]), task, expectation, generator)
        for own in _by_vmap(of_one, len(at), logits, trained, batch[:1], at):
            count = len(next(iter(own.values())))
            frozen = {k: p.new_zeros(count, len(at), p.numel()) for k, p in parameters.items()}
            rows = [own[k].flatten(2) if k in own else frozen[k] for k in parameters]
            at_columns = torch.cat(rows, 2).flatten(0, 1).double()
            total.addmm_(at_columns.T, at_columns)
            samples += count
    return total.div_(max(samples, 1)).to(like.dtype)
