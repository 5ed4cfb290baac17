"""Solvers of quadratic problems by blocks, and the choice of the best iterate.

The gradient of ``Q(w) = 1/2 sum_i p_i (w - w_i)^T F_i (w - w_i)`` is ``S w - b`` with
``S = sum p_i F_i`` and ``b = sum p_i F_i w_i``. S is block diagonal: a block is a parameter of a
diagonal Fisher, a layer of a K-FAC Fisher, or all parameters of a full Fisher. Blocks do not keep
client models.

The iterations compute the correction ``d`` of the mean, with ``S d = r`` and d = 0 at the start. S
is available only as a product with vectors, and ``r`` is the negative gradient at the mean. From 0,
gradient descent and conjugate gradients reach the shortest solution. Each yields the correction
after each step, and ends when no step can improve it. The yielded tensor changes with the next
step.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flsuite.aggregators.rules.mean import quotient
from flsuite.common.random import torch_generator

_EIGENVALUE_STEPS = 100
# Descent is stable up to a step of 2 / lambda_max, so a thousandth is accurate enough.
_EIGENVALUE_TOLERANCE = 1e-3
# Relative rounding error of a residual ``b - S wbar`` of float64 sums.
_ROUNDING = 1e-13
# Layers with more entries are multiplied in float32.
_FLOAT64_ENTRIES = 2**17


class Block(ABC):
    """A block of the quadratic, which can be minimized independently.

    Args:
        mean: The clients' mean, ``wbar = sum p_i w_i``, in float64.
        target: ``b``, in the shape of ``mean`` and in float64.

    Attributes:
        residual: ``b - S wbar``, the negative gradient at the mean.
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
        """Return the correction of the mean to the closest minimum, in so many steps at most."""

    def largest(self) -> float:
        """Return the largest eigenvalue of S, by power iteration."""
        # A fixed vector, because the result must not depend on earlier draws.
        start = torch_generator(0, "power iteration")
        x = torch.randn(self.mean.shape, generator=start, dtype=self.mean.dtype)
        x /= x.norm()
        estimate = 0.0

        for _ in range(_EIGENVALUE_STEPS):
            image = self.product(x)
            before, estimate = estimate, float(image.norm())
            if estimate == 0 or abs(estimate - before) <= _EIGENVALUE_TOLERANCE * estimate:
                break
            x = image / estimate
        return estimate


class Diagonal(Block):
    """A block with a diagonal S.

    Args:
        mean: ``wbar``, of any shape.
        target: ``b``.
        fisher: The diagonal of S, in the same shape.
    """

    def __init__(self, mean: Tensor, target: Tensor, fisher: Tensor) -> None:
        # A masked sum is rounded, so b may be nonzero where S is 0, which has no solution.
        self.fisher = fisher.clamp(min=0)
        super().__init__(mean, torch.where(fisher > 0, target, 0.0))

    def product(self, x: Tensor) -> Tensor:
        return self.fisher * x

    def diagonal(self) -> Tensor:
        return self.fisher

    def limit(self, steps: int) -> Tensor:
        return quotient(self.residual, self.fisher)

    def largest(self) -> float:
        return float(self.fisher.max())


Factors = tuple[float, Tensor, Tensor]
"""The K-FAC Fisher of a layer on one client, ``F vec(W) = G W A``: the client's fraction ``p_i`` of
the samples, the second moments A of the layer's inputs, ``(in, in)``, and G of the gradients at its
outputs, ``(out, out)``."""


class Kronecker(Block):
    """A layer whose S is a sum of Kronecker products, which are never formed.

    Large layers are multiplied in float32 to save time. The residual is always float64.

    Args:
        mean: ``wbar`` as a matrix ``(out, in)``.
        target: ``b``, ``sum p_i G_i W_i A_i``.
        factors: The factors of each client.
    """

    def __init__(self, mean: Tensor, target: Tensor, factors: Sequence[Factors]) -> None:
        self._dtype, self.factors = torch.float64, factors
        super().__init__(mean, target)

        # After the residual, which is computed in float64.
        if mean.numel() > _FLOAT64_ENTRIES:
            self._dtype = torch.float32
        self.factors = [(p, a.to(self._dtype), g.to(self._dtype)) for p, a, g in factors]

    def product(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x, dtype=self._dtype)
        x = x.to(self._dtype)
        for share, a, g in self.factors:
            # Apply p_i once: on both factors, it would be squared.
            total.addmm_(g.to(self._dtype), x @ a.to(self._dtype), alpha=share)
        return total.double()

    def diagonal(self) -> Tensor:
        total = torch.zeros_like(self.mean)
        for share, a, g in self.factors:
            total.addr_(g.diagonal(), a.diagonal(), alpha=share)
        return total

    def limit(self, steps: int) -> Tensor:
        iterates = conjugate_gradients(self)
        last = deque(islice(iterates, steps), maxlen=1)
        return last[0] if last else torch.zeros_like(self.mean)


class Dense(Block):
    """All parameters in one block, with S as a matrix.

    Args:
        mean: ``wbar``, ``(d,)``.
        target: ``b``, ``(d,)``.
        fisher: S, ``(d, d)``, a mean of the Fishers that clients send in float32.
    """

    def __init__(self, mean: Tensor, target: Tensor, fisher: Tensor) -> None:
        self.fisher = fisher
        super().__init__(mean, target)

    def product(self, x: Tensor) -> Tensor:
        return self.fisher @ x

    def diagonal(self) -> Tensor:
        return self.fisher.diagonal()

    def limit(self, steps: int) -> Tensor:
        # An eigenvalue below the rounding of float32 is noise, with a huge inverse.
        noise = len(self.fisher) * torch.finfo(torch.float32).eps
        return torch.linalg.pinv(self.fisher, rtol=noise, hermitian=True) @ self.residual


def gradient_descent(block: Block) -> Iterator[Tensor]:
    """Run gradient descent with the step ``1 / lambda_max``: lemma 1 of FedFisher."""
    d, largest = torch.zeros_like(block.residual), block.largest()
    while largest > 0:
        d += (block.residual - block.product(d)) / largest
        yield d


def conjugate_gradients(block: Block) -> Iterator[Tensor]:
    """Minimize over the span of ``r, S r, S^2 r, ...``: Hestenes and Stiefel 1952.

    It has the same limit as gradient descent, and reaches it in fewer steps. It stops below the
    rounding errors of r.
    """
    r = block.residual
    d, residual, direction = torch.zeros_like(r), r.clone(), r.clone()
    square = float(residual.square().sum())

    while square > block.noise**2:
        image = block.product(direction)
        curvature = float((direction * image).sum())
        # Zero in the null space of S. Rounding can make it negative.
        if curvature <= 0:
            return

        rate = square / curvature
        d.add_(direction, alpha=rate)
        residual.sub_(image, alpha=rate)
        before, square = square, float(residual.square().sum())
        direction.mul_(square / before).add_(residual)
        yield d


def adam(block: Block, inside: bool) -> Iterator[Tensor]:
    """Run the Adam of FedFisher's tables: ``m = .9 m + g``, ``v = .99 v + g^2``.

    The step is ``.01 m / (sqrt(v) + .01)``. The sums are not averages: this is Adam with the rate
    .01, the betas .9 and .99 and the epsilon .001, without bias correction.

    Args:
        block: The block.
        inside: Whether the step is ``.01 m / sqrt(v + .01)`` instead.
    """
    d, m, v = (torch.zeros_like(block.residual) for _ in range(3))
    while True:
        gradient = block.product(d) - block.residual
        m.mul_(0.9).add_(gradient)
        v.mul_(0.99).addcmul_(gradient, gradient)
        d.addcdiv_(m, (v + 0.01).sqrt() if inside else v.sqrt() + 0.01, value=-0.01)
        yield d


SolverName = Literal["cg+gd", "cg", "gd", "adam", "exact"]

Corrections = Sequence[Tensor]
"""The corrections added to each block's mean."""

_SPACED = frozenset(digit * 10**power for digit in (1, 2, 5) for power in range(9)) | {0}


class Iterate(NamedTuple):
    """One iterate of a solver.

    Attributes:
        step: Its number, 0 at the mean.
        corrections: The corrections added to each block's mean.
        score: Its score, or ``None`` if not scored.
        way: The place of its solver among :func:`solvers`.
    """

    step: int
    corrections: Corrections
    score: float | None = None
    way: int = 0


def default_steps(solver: SolverName, scored: bool) -> int:
    """Return the number of steps of a solver. Without a score, it is low: the limit overfits."""
    if not scored and solver in ("cg+gd", "cg"):
        return 50
    return {"cg+gd": 100, "cg": 200}.get(solver, 2000)


def solvers(name: SolverName, scored: bool) -> tuple[SolverName, ...]:
    """Return the solvers to run, one after another. Without a score, only the first one runs."""
    if name != "cg+gd":
        return (name,)
    return ("cg", "gd") if scored else ("cg",)


def is_scored(solver: SolverName, step: int) -> bool:
    """Return whether to score a solver's model after a step. The last one is always scored."""
    # Early steps change much, late ones little. Adam's steps have equal lengths.
    return step % 100 == 0 if solver == "adam" else step in _SPACED


def iterates(
    blocks: Sequence[Block], solver: SolverName, steps: int, inside: bool = False
) -> Iterator[Corrections]:
    """Yield the corrections of all blocks at first and after each step, while any of them changes.

    The tensors change with the next step.

    Args:
        blocks: The blocks, which are solved in parallel.
        solver: Its name. ``exact`` has a single step, to the limit.
        steps: The maximum number of steps.
        inside: See :func:`adam`.
    """

    def path(block: Block) -> Iterator[Tensor]:
        if solver == "cg":
            return conjugate_gradients(block)
        if solver == "gd":
            return gradient_descent(block)
        if solver == "adam":
            return adam(block, inside)
        return iter([block.limit(steps)])

    paths = [path(block) for block in blocks]
    current = [torch.zeros_like(block.mean) for block in blocks]
    yield current
    for _ in range(steps):
        following = [next(path, None) for path in paths]
        if all(correction is None for correction in following):
            return
        # A converged block keeps its value.
        current = [old if new is None else new for old, new in zip(current, following, strict=True)]
        yield current


def best_iterate(
    blocks: Sequence[Block],
    solver: SolverName,
    steps: int,
    score: Callable[[Corrections], float] | None = None,
    inside: bool = False,
) -> Iterate:
    """Return the iterate with the highest score, the first on a tie.

    Without ``score``, it is the last one of the first solver.

    Args:
        blocks: The blocks.
        solver: The solver, or both as ``cg+gd``. It decides which iterates are scored.
        steps: The maximum number of steps.
        score: Returns the score of the model with these corrections.
        inside: See :func:`adam`.
    """
    best: Iterate | None = None
    for way, name in enumerate(solvers(solver, score is not None)):
        for step, corrections in enumerate(iterates(blocks, name, steps, inside)):
            if score is not None and is_scored(name, step):
                best = _better(best, Iterate(step, corrections, score(corrections), way))
        if score is None:
            return Iterate(step, corrections)
        if not is_scored(name, step):
            best = _better(best, Iterate(step, corrections, score(corrections), way))
    assert best is not None  # each solver has scored its last step
    return best


def _better(best: Iterate | None, other: Iterate) -> Iterate:
    if best is not None and (other.score or 0.0) <= (best.score or 0.0):
        return best
    # Clone, because the solver modifies these tensors.
    return other._replace(corrections=[correction.clone() for correction in other.corrections])
