"""Sums of many tensors."""

import torch
from torch import Tensor

__all__ = ["Total"]

# Terms that are added in float32 before their sum goes to float64. They are few enough to keep
# seven digits.
_AT_ONCE = 8


class Total:
    """A sum of float32 tensors, added a few at a time in float32 and then in float64.

    Args:
        like: A tensor of the shape and device of the terms.
    """

    def __init__(self, like: Tensor) -> None:
        self._sum = torch.zeros_like(like, dtype=torch.float64)
        self._few = torch.zeros_like(like, dtype=torch.float32)
        self._added = 0

    def add(self, term: Tensor) -> None:
        """Add a term."""
        self._few += term
        self._added += 1
        if self._added % _AT_ONCE == 0:
            self._flush()

    def value(self) -> Tensor:
        """Return the sum in float64."""
        self._flush()
        return self._sum

    def _flush(self) -> None:
        self._sum += self._few
        self._few.zero_()
