"""Gradients of single samples for any parameters, vectorized over samples by torch.func."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.state import State

Batch = tuple[Tensor, ...]

# Elements of per-sample gradients at a time, 64 MiB. More would far exceed the cache and be slower.
_NUMBERS_AT_ONCE = 2**24


def sample_squares(
    outputs: Any, parameters: State, batch: Batch, columns: Tensor
) -> Iterator[State]:
    """Yield sums over samples and columns of squared gradients, for a few samples at a time.

    Args:
        outputs: A :class:`~flsuite.metrics.fisher.columns.Logits`, or a log-likelihood.
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


def sample_gradients(
    outputs: Any, parameters: State, batch: Batch, columns: Tensor
) -> Iterator[State]:
    """Yield the gradients ``(samples, columns, *shape)``, for a few samples at a time."""

    def of_one(pullback: Any, columns: Tensor) -> State:
        gradients = [pullback(column)[0] for column in columns]
        return {
            name: torch.stack([gradient[name] for gradient in gradients]) for name in parameters
        }

    return _by_vmap(of_one, len(columns), outputs, parameters, batch, columns)


def _by_vmap(
    of_one: Any, kept: int, outputs: Any, parameters: State, batch: Batch, columns: Tensor
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
            raise FlsuiteError(
                f"{outputs.owner}.{outputs.needs} cannot be vectorized over samples "
                f"({one_line(error, longest=200)}); write it without in-place operations and "
                f".item(){outputs.otherwise}"
            ) from error
