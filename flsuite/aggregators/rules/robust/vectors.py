"""Flat vectors of a cohort, one per client, and the operations of robust rules on them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from flsuite.common.state import State

_BLOCK = 4096  # coordinates; a block of a hundred clients fits in the cache

Reduce = Callable[[np.ndarray], np.ndarray]
"""Returns one number per coordinate, given its values ``(coordinates, clients)``, ascending."""


class Vectors:
    """Flat vectors of the same entries of several clients' models, and of the global model.

    All operations run block by block. A block has 4096 coordinates in float64, which is 3 MB for a
    hundred clients. The order of every sum is fixed.

    Args:
        start: The global model's values ``(coordinates,)``.
        rows: The clients' values, each ``(coordinates,)``, in the dtype of ``start``. A client's
            change is its row minus ``start``.
    """

    def __init__(self, start: Tensor, rows: Sequence[Tensor]) -> None:
        self.start = start
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every change, float64 ``(clients,)``."""
        total = torch.zeros(len(self), dtype=torch.float64)
        for block in self._blocks():
            total += self._changes(block).square().sum(1)
        return total

    def are_rounding(self) -> Tensor:
        """Return whether a change stays within the rounding of all values, bool ``(clients,)``.

        A client's few steps back and forth may end some units in the last place away.
        """
        within = torch.ones(len(self), dtype=torch.bool)
        for block in self._blocks():
            rounding = 4 * torch.finfo(self.start.dtype).eps * self.start[block].double().abs()
            within &= (self._changes(block).abs() <= rounding).all(1)
        return within

    def products(self, vector: Tensor) -> Tensor:
        """Return the inner product of every change with a vector, float64 ``(clients,)``."""
        total = torch.zeros(len(self), dtype=torch.float64)
        for block in self._blocks():
            total += self._changes(block) @ vector[block].double()
        return total

    def gram(self, *others: Tensor) -> Tensor:
        """Return the inner products of all changes with each other, float64, exactly symmetric.

        Args:
            others: Further vectors ``(coordinates,)``, appended after the changes.
        """
        count = len(self) + len(others)
        total = torch.zeros(count, count, dtype=torch.float64)
        for block in self._blocks():
            further = [other[block].double()[None] for other in others]
            changes = torch.cat([self._changes(block), *further])
            total.addmm_(changes, changes.T)
        # A product may round differently from its transpose, but ties must be preserved.
        return total.triu() + total.triu(1).T

    def mean(
        self,
        weights: Iterable[float],
        total: float,
        rest: float = 0.0,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Return ``(sum_k weights_k row_k + rest (start + offset)) / total``, summed in float64.

        A client of weight 0 is ignored, whatever it sent.
        """
        summed = torch.zeros_like(self.start, dtype=torch.float64)
        for row, weight in zip(self.rows, weights, strict=True):
            if weight:
                summed.add_(row, alpha=weight)
        if rest:
            summed.add_(self.start if offset is None else self.start.double() + offset, alpha=rest)
        return summed.div_(total).to(self.start.dtype)

    def moved(self, weights: Iterable[float], total: float) -> Tensor:
        """Return ``start + sum_k weights_k (row_k - start) / total``, summed in float64.

        Unlike in :meth:`mean`, weights may be large, because they multiply only the change.
        """
        start = self.start.double()
        change = torch.zeros_like(start)
        for row, weight in zip(self.rows, weights, strict=True):
            if weight:
                change.add_(row.double().sub_(start), alpha=weight)
        return change.div_(total).add_(start).to(self.start.dtype)

    def by_coordinate(self, reduce: Reduce) -> Tensor:
        """Return ``reduce`` of the clients' sorted values, coordinate by coordinate."""
        result = torch.empty_like(self.start)
        for block in self._blocks():
            # NumPy sorts short contiguous rows many times faster than torch.
            values = torch.stack([row[block] for row in self.rows], dim=1).numpy()
            values.sort(axis=1)
            result[block] = torch.from_numpy(reduce(values))
        return result

    def median(self) -> Tensor:
        """Return the coordinate-wise median, with the mean of the middle two for an even number."""
        low, high = (len(self) - 1) // 2, len(self) // 2
        return self.by_coordinate(lambda v: (v[:, low].astype(np.float64) + v[:, high]) / 2)

    def _blocks(self) -> Iterator[slice]:
        for first in range(0, len(self.start), _BLOCK):
            yield slice(first, first + _BLOCK)

    def _changes(self, block: slice) -> Tensor:
        """Return the changes of some coordinates, float64 ``(clients, coordinates)``."""
        return torch.stack([row[block] for row in self.rows]).double().sub_(self.start[block])


def squared_distances(gram: Tensor) -> Tensor:
    """Return the squared distances of all pairs, given the inner products.

    A distance too large for float64 is infinite.
    """
    norms = gram.diagonal()
    squares = norms[:, None] + norms - 2 * gram
    return squares.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp(min=0.0)


def distances_from(gram: Tensor, v: Tensor) -> Tensor:
    """Return the distances of points from ``sum_k v_k x_k``, given all inner products."""
    products = gram @ v
    return (gram.diagonal() - 2 * products + v @ products).clamp(min=0.0).sqrt()


def row_dtype(state: State) -> torch.dtype:
    """Return a lossless dtype for rows: float64 if the state has any, else float32."""
    has_double = any(value.dtype == torch.float64 for value in state.values())
    return torch.float64 if has_double else torch.float32


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread.

    A sum that is split over threads is rounded differently. A rule's choice must not depend on the
    number of threads that an engine has set.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
