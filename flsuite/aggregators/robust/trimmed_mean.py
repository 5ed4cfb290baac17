"""Coordinate-wise trimmed mean: Yin et al. 2018, definition 2 and algorithm 1, option II.

Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv:1803.01498.
"""

import numpy as np
from torch import Tensor

from flsuite.aggregators.robust.base import (
    ParameterRule,
    more_clients,
    number_of,
    require_number,
)
from flsuite.aggregators.robust.cohort import Cohort
from flsuite.aggregators.robust.vectors import Vectors

__all__ = ["TrimmedMean"]


class TrimmedMean(ParameterRule):
    """The mean of the clients' models without the extremes, coordinate by coordinate.

    The ``b`` largest and the ``b`` smallest values of a coordinate are left out, and ``b``
    attackers cannot move it beyond the range of the others. Without any it is the plain mean.
    Buffers are trimmed like parameters.

    No client is left out as a whole, so that the log has no weights. The models of a round are in
    memory at a time: for ``n`` clients of ``d`` parameters ``4 n d`` bytes.

    Args:
        trim: Clients left out at each end, ``b``, as an integer, or the share of them in [0, 0.5)
            as a float, beta. More than ``2 b`` must come back.
    """

    def __init__(self, trim: int | float = 0.1) -> None:
        self.trim = trim
        require_number("TrimmedMean", trim=trim)

    def combine(self, cohort: Cohort) -> Tensor:
        return self.combine_statistics(cohort.parameters)

    def combine_statistics(self, statistics: Vectors) -> Tensor:
        count = len(statistics)
        trim = number_of(self.trim, count)
        if trim == 0:
            return statistics.mean([1.0] * count, count)
        kept = slice(trim, count - trim)
        return statistics.by_coordinate(lambda v: v[:, kept].mean(1, dtype=np.float64))

    def too_few(self, updates: int) -> str | None:
        trim = number_of(self.trim, updates)
        if updates > 2 * trim:
            return None
        return (
            f"TrimmedMean needs more than 2 b = {2 * trim} updates for b = {trim}, and there are "
            f"{updates}; {more_clients('trim', (updates - 1) // 2)}"
        )
