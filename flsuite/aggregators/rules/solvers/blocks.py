"""The blocks of the quadratic ``Q(w) = 1/2 sum_i p_i (w - w_i)^T F_i (w - w_i)``.

Its gradient is ``S w - b`` with ``S = sum p_i F_i`` and ``b = sum p_i F_i w_i``. S is block
diagonal: a block is a parameter of a diagonal Fisher, a layer of a K-FAC Fisher, or all parameters
of a full one. No block keeps the model of a client.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from flsuite.aggregators.rules.solvers.iterations import conjugate_gradients, largest_eigenvalue

__all__ = ["Block", "Dense", "Diagonal", "Factors", "Kronecker"]

# The relative rounding error of a residual ``b - S wbar``, whose terms are sums in float64.
_ROUNDING = 1e-13
# Entries of a layer up to which its products are float64.
_FLOAT64_ENTRIES = 2**17


class Block(ABC):
    """A part of the quadratic that can be minimised on its own.

    Args:
        mean: The clients' mean, ``wbar = sum p_i w_i``, in float64.
        target: ``b``, in the shape of ``mean`` and in float64.

    Attributes:
        residual: ``b - S wbar``, minus the gradient at the mean.
        noise: The norm of the residual's rounding errors.
    """

    def __init__(self, mean: Tensor, target: Tensor) -> None:
        self.mean = mean
        self.residual = target - self.product(mean)
        self.noise = _ROUNDING * float(target.norm())

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Return ``S x`` in float64, in the shape of ``x``."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal of S, in the shape of the mean."""

    @abstractmethod
    def limit(self, steps: int) -> Tensor:
        """Return the correction of the mean to the closest minimum.

        Args:
            steps: The largest number of iterations, where it takes any.
        """

    def largest(self) -> float:
        """Return the largest eigenvalue of S."""
        return largest_eigenvalue(self.product, self.mean)


class Diagonal(Block):
    """A block with a diagonal S.

    Args:
        mean: ``wbar``, of any shape.
        target: ``b``.
        fisher: The diagonal of S, in the same shape.
    """

    def __init__(self, mean: Tensor, target: Tensor, fisher: Tensor) -> None:
        # A masked sum is rounded: b may have a digit left where S has none, and nothing solves it.
        self.fisher = fisher.clamp(min=0)
        super().__init__(mean, torch.where(fisher > 0, target, 0.0))

    def product(self, x: Tensor) -> Tensor:
        return self.fisher * x

    def diagonal(self) -> Tensor:
        return self.fisher

    def limit(self, steps: int) -> Tensor:
        known = self.fisher > 0
        # Divide by 1 elsewhere: 0 / 0 would be NaN even where it is not chosen.
        return torch.where(known, self.residual / torch.where(known, self.fisher, 1.0), 0.0)

    def largest(self) -> float:
        return float(self.fisher.max())


class Factors(NamedTuple):
    """The K-FAC Fisher of a layer on one client, ``F vec(W) = G W A``.

    Attributes:
        share: ``p_i``, the client's share of the samples.
        a: The moments of the layer's inputs, ``(in, in)``.
        g: The moments of the gradients at its outputs, ``(out, out)``.
    """

    share: float
    a: Tensor
    g: Tensor


class Kronecker(Block):
    """A layer whose S is a sum of Kronecker products. They are never formed.

    Large layers are multiplied in float32, in half the time. Conjugate gradients then need a step
    or two more for the same value of Q. The residual is float64 in any case.

    Args:
        mean: ``wbar`` as a matrix ``(out, in)``.
        target: ``b``, ``sum p_i G_i W_i A_i``.
        factors: Those of each client.
    """

    def __init__(self, mean: Tensor, target: Tensor, factors: Sequence[Factors]) -> None:
        self._dtype, self.factors = torch.float64, factors
        super().__init__(mean, target)

        # After the residual, which is computed in float64.
        if mean.numel() > _FLOAT64_ENTRIES:
            self._dtype = torch.float32
        self.factors = [Factors(f.share, f.a.to(self._dtype), f.g.to(self._dtype)) for f in factors]

    def product(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x, dtype=self._dtype)
        x = x.to(self._dtype)
        for share, a, g in self.factors:
            # p_i counts once: on both factors, a client would count by its square.
            total.addmm_(g.to(self._dtype), x @ a.to(self._dtype), alpha=share)
        return total.double()

    def diagonal(self) -> Tensor:
        total = torch.zeros_like(self.mean)
        for share, a, g in self.factors:
            total.addr_(g.diagonal(), a.diagonal(), alpha=share)
        return total

    def limit(self, steps: int) -> Tensor:
        iterates = conjugate_gradients(self.product, self.residual, self.noise)
        last = deque(islice(iterates, steps), maxlen=1)
        return last[0] if last else torch.zeros_like(self.mean)


class Dense(Block):
    """All parameters in one block, with S as a matrix.

    Args:
        mean: ``wbar``, ``(d,)``.
        target: ``b``, ``(d,)``.
        fisher: S, ``(d, d)``.
        sent_as: The dtype in which clients have sent their Fishers.
    """

    def __init__(
        self, mean: Tensor, target: Tensor, fisher: Tensor, sent_as: torch.dtype = torch.float64
    ) -> None:
        self.fisher, self.sent_as = fisher, sent_as
        super().__init__(mean, target)

    def product(self, x: Tensor) -> Tensor:
        return self.fisher @ x

    def diagonal(self) -> Tensor:
        return self.fisher.diagonal()

    def limit(self, steps: int) -> Tensor:
        # An eigenvalue below the rounding of what was sent is noise, and its inverse is huge.
        noise = len(self.fisher) * torch.finfo(self.sent_as).eps
        return torch.linalg.pinv(self.fisher, rtol=noise, hermitian=True) @ self.residual
