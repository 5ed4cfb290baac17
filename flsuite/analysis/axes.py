"""The horizontal axes of curves: rounds, seconds, and work."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

import pandas as pd

Name = TypeVar("Name", bound=Hashable)


class Axis(NamedTuple):
    """A column of ``metrics.csv`` as an axis.

    Attributes:
        label: The axis label in pictures.
        unit: The unit of a value, in the plural.
        scale: Factor from a value of the column to this unit.
        is_whole: Whether all values are whole numbers.
    """

    label: str
    unit: str
    scale: float = 1.0
    is_whole: bool = False

    def amount(self, value: float) -> str:
        """Return a value of the column as text with its unit."""
        number = self.number(value)
        is_one = number == "1" and self.is_whole
        return f"{number} {self.unit.removesuffix('s') if is_one else self.unit}"

    def number(self, value: float) -> str:
        """Return a value of the column as text, with three digits or more before the point."""
        scaled = value * self.scale
        return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


AXES = {
    "round": Axis("round", "rounds", is_whole=True),
    "virtual_s": Axis("virtual seconds", "virtual s"),
    "wall_s": Axis("seconds", "s"),
    "client_updates": Axis("client updates", "client updates", is_whole=True),
    "bytes": Axis("MB sent and received", "MB", scale=1e-6),
}


def aligned(curves: Mapping[Name, pd.Series], x: str) -> pd.DataFrame:
    """Return the curves of runs as columns of one table.

    Runs share their rounds, but not their points on other axes. On these, the rows are the points
    of all curves in the range that every curve covers. A curve's value at a row is its last one at
    or before that point.
    """
    if x == "round":
        return pd.DataFrame(dict(curves))

    # If a point has several values, such as updates that arrive together, the last one counts.
    curves = {
        name: curve[~curve.index.duplicated(keep="last")].sort_index()
        for name, curve in curves.items()
    }
    covered = [curve.index for curve in curves.values() if len(curve)]
    first = max((points[0] for points in covered), default=0.0)
    last = min((points[-1] for points in covered), default=0.0)

    points = sorted({point for points in covered for point in points if first <= point <= last})
    shared = pd.Index(points, dtype=float)
    return pd.DataFrame(
        {name: curve.reindex(shared, method="ffill") for name, curve in curves.items()},
        index=shared,
    )
