"""Scaling of table columns, fitted on training rows."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

ScaleName = Literal["minmax", "standard", "none"]
_LOW, _HIGH = 0.1, 0.9


@dataclass(frozen=True)
class ColumnScale:
    """The map ``base + (x - offset) / divisor`` per column, then clipped to ``bounds``.

    Attributes:
        offset, divisor, base: float64 ``(columns,)``. An infinite divisor maps a column to its
            base.
        bounds: The smallest and the largest result. ``None`` means no clipping.
    """

    offset: np.ndarray
    divisor: np.ndarray
    base: np.ndarray
    bounds: tuple[float, float] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Scale ``(rows, columns)``, float64 or float32, in place: large tables fit only once."""
        x -= self.offset
        x /= self.divisor
        x += self.base
        return x if self.bounds is None else np.clip(x, *self.bounds, out=x)


def fit_scale(name: ScaleName, train: np.ndarray) -> ColumnScale:
    """Fit a scaling to training rows ``(rows, columns)``.

    ``minmax`` scales training rows to [0.1, 0.9] and clips all rows to [0, 1]. The margin keeps
    values slightly outside the training rows off the bounds. ``standard`` scales training rows
    to mean 0 and deviation 1. ``none`` changes nothing. A column that is constant in the training
    rows carries no information and becomes 0.5 (``minmax``) or 0 (``standard``) everywhere.
    """
    columns = train.shape[1]
    zeros, ones = np.zeros(columns), np.ones(columns)
    if name == "none":
        return ColumnScale(zeros, ones, zeros)

    low, high = train.min(0).astype(np.float64), train.max(0).astype(np.float64)
    if name == "standard":
        offset, base, middle, bounds = train.mean(0, dtype=np.float64), zeros, 0.0, None
        divisor = train.std(0, dtype=np.float64)
    else:
        offset, base, middle, bounds = low, ones * _LOW, 0.5, (0.0, 1.0)
        divisor = (high - low) / (_HIGH - _LOW)

    # Both are needed: a repeated 0.1 has a nonzero deviation, and 1e-300 has deviation 0.
    constant = (low == high) | (divisor == 0)
    return ColumnScale(
        offset, np.where(constant, np.inf, divisor), np.where(constant, middle, base), bounds
    )
