"""Iterations towards the correction ``d`` of a point, with ``S d = r`` and d = 0 at the start.

``S`` is symmetric positive semidefinite, and known by its products alone. ``r`` is minus the
gradient at the point. Among the solutions, gradient descent and conjugate gradients from 0 reach
the shortest.

Every function yields the correction after each step, and ends where no step can improve it. The
tensor that it yields changes with the next step.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flsuite.random import torch_generator

__all__ = ["Product", "adam", "conjugate_gradients", "gradient_descent", "largest_eigenvalue"]

Product = Callable[[Tensor], Tensor]
"""Maps ``x`` to ``S x``, in the shape of ``x``."""

_EIGENVALUE_STEPS = 100
# The descent is stable up to a step of 2 / lambda_max. A rate within a thousandth is far from it.
_EIGENVALUE_TOLERANCE = 1e-3


def gradient_descent(product: Product, r: Tensor, largest: float) -> Iterator[Tensor]:
    """Descend with the step ``1 / lambda_max``: lemma 1 of FedFisher.

    Args:
        product: The product with S.
        r: Minus the gradient at the start.
        largest: lambda_max, the largest eigenvalue of S.
    """
    d = torch.zeros_like(r)
    while largest > 0:
        d += (r - product(d)) / largest
        yield d


def conjugate_gradients(product: Product, r: Tensor, noise: float) -> Iterator[Tensor]:
    """Minimise over the span of ``r, S r, S^2 r, ...``: Hestenes and Stiefel 1952.

    It has the limit of gradient descent, and reaches it in fewer steps.

    Args:
        product: The product with S.
        r: Minus the gradient at the start.
        noise: The norm of the rounding errors of r. Below it there is nothing left to solve.
    """
    d, residual, direction = torch.zeros_like(r), r.clone(), r.clone()
    square = float(residual.square().sum())

    while square > noise**2:
        image = product(direction)
        curvature = float((direction * image).sum())
        # Zero where S knows nothing of the direction. Rounding can make it negative.
        if curvature <= 0:
            return

        rate = square / curvature
        d.add_(direction, alpha=rate)
        residual.sub_(image, alpha=rate)
        before, square = square, float(residual.square().sum())
        direction.mul_(square / before).add_(residual)
        yield d


def adam(product: Product, r: Tensor, inside: bool) -> Iterator[Tensor]:
    """Descend as FedFisher's tables do: ``m = .9 m + g``, ``v = .99 v + g^2``.

    The step is ``.01 m / (sqrt(v) + .01)``. The sums are not averaged: it is Adam with the rate
    .01, the betas .9 and .99 and the epsilon .001, without bias correction.

    Args:
        product: The product with S.
        r: Minus the gradient at the start.
        inside: Whether the step is ``.01 m / sqrt(v + .01)`` instead.
    """
    d, m, v = torch.zeros_like(r), torch.zeros_like(r), torch.zeros_like(r)
    while True:
        gradient = product(d) - r
        m.mul_(0.9).add_(gradient)
        v.mul_(0.99).addcmul_(gradient, gradient)
        d.addcdiv_(m, (v + 0.01).sqrt() if inside else v.sqrt() + 0.01, value=-0.01)
        yield d


def largest_eigenvalue(product: Product, like: Tensor) -> float:
    """Return the largest eigenvalue of S by power iteration.

    Args:
        product: The product with S.
        like: A tensor of the shape and dtype that S applies to.
    """
    # A fixed vector: the result must not depend on what has drawn before.
    x = torch.randn(like.shape, generator=torch_generator(0, "power iteration"), dtype=like.dtype)
    x /= x.norm()
    estimate = 0.0

    for _ in range(_EIGENVALUE_STEPS):
        image = product(x)
        before, estimate = estimate, float(image.norm())
        if estimate == 0 or abs(estimate - before) <= _EIGENVALUE_TOLERANCE * estimate:
            break
        x = image / estimate
    return estimate
