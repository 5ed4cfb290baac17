"""The solvers by name, and the selection of the best iterate."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flsuite.aggregators.rules.solvers.blocks import (
    Block,
    adam,
    conjugate_gradients,
    gradient_descent,
)

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
    """

    step: int
    corrections: Corrections
    score: float | None


def default_steps(solver: SolverName, scored: bool) -> int:
    """Return the number of steps of a solver.

    Args:
        solver: Its name.
        scored: Whether the best iterate is kept instead of the last. The limit overfits.
    """
    if not scored and solver in ("cg+gd", "cg"):
        return 50
    return {"cg+gd": 100, "cg": 200}.get(solver, 2000)


def solvers(name: SolverName, scored: bool) -> tuple[SolverName, ...]:
    """Return the solvers to run, one after another.

    Args:
        name: The solver, or both as ``cg+gd``.
        scored: Whether the best model is kept. Without a score, only the first solver runs.
    """
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
    """Yield the corrections of all blocks after each step, while any of them changes.

    The tensors change with the next step.

    Args:
        blocks: The blocks, which are solved in parallel.
        solver: Its name. ``exact`` has a single step, to the limit.
        steps: The maximum number of steps.
        inside: See :func:`~flsuite.aggregators.rules.solvers.blocks.adam`.
    """
    paths = [_path(block, solver, steps, inside) for block in blocks]
    current = [torch.zeros_like(block.mean) for block in blocks]
    for _ in range(steps):
        following = [next(path, None) for path in paths]
        if all(correction is None for correction in following):
            return
        # A converged block keeps its value.
        current = [old if new is None else new for old, new in zip(current, following, strict=True)]
        yield current


def best_iterate(
    blocks: Sequence[Block],
    path: Iterator[Corrections],
    solver: SolverName,
    score: Callable[[Corrections], float] | None,
) -> Iterate:
    """Return the iterate with the highest score, the first on a tie.

    Without ``score``, it is the last one.

    Args:
        blocks: The blocks.
        path: The corrections after each step.
        solver: The name of the solver, which decides which iterates are scored.
        score: Returns the score of the model with these corrections.
    """
    start: Corrections = [torch.zeros_like(block.mean) for block in blocks]
    best: Iterate | None = None
    for step, corrections in enumerate(chain([start], path)):
        if score is not None and is_scored(solver, step):
            best = _better(best, step, corrections, score)

    if score is None:
        return Iterate(step, corrections, None)
    return best if best and is_scored(solver, step) else _better(best, step, corrections, score)


def _better(
    best: Iterate | None, step: int, corrections: Corrections, score: Callable[[Corrections], float]
) -> Iterate:
    value = score(corrections)
    if best is not None and best.score is not None and value <= best.score:
        return best
    # Clone, because the solver modifies these tensors.
    return Iterate(step, [correction.clone() for correction in corrections], value)


def _path(block: Block, solver: SolverName, steps: int, inside: bool) -> Iterator[Tensor]:
    """Return the corrections of one block after each step."""
    if solver == "cg":
        return conjugate_gradients(block.product, block.residual, block.noise)
    if solver == "gd":
        return gradient_descent(block.product, block.residual, block.largest())
    if solver == "adam":
        return adam(block.product, block.residual, inside)
    return iter([block.limit(steps)])
