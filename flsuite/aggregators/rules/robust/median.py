"""Coordinate-wise median and trimmed mean: Yin et al. 2018, definitions 1 and 2, algorithm 1.

Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv:1803.01498.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.robust.base import Clients, ParameterRule, more_clients, number_of
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.vectors import Vectors


@dataclass(frozen=True)
class CoordinateMedian(ParameterRule):
    """The median of the clients' models, coordinate by coordinate: option I.

    Less than half of the clients cannot move a coordinate beyond the range of the others. For an
    even number of clients, it is the mean of the two middle values.

    No client is excluded, so there are no weights in the log.
    """

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        return cohort.parameters.median()


@dataclass(frozen=True)
class TrimmedMean(ParameterRule):
    """The mean of the clients' models without the extremes, coordinate by coordinate: option II.

    The ``b`` largest and the ``b`` smallest values of a coordinate are excluded, so ``b`` attackers
    cannot move it beyond the range of the others. With ``b = 0``, it is the plain mean. Buffers are
    trimmed like parameters.

    No client is excluded as a whole, so there are no weights in the log.

    Args:
        trim: Clients to exclude at each end, ``b``, as an integer, or their fraction beta in
            [0, 0.5) as a float. More than ``2 b`` must come back.
    """

    trim: Clients = 0.1

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        return self.buffers(cohort.parameters)

    def buffers(self, buffers: Vectors) -> Tensor:
        count = len(buffers)
        trim = number_of(self.trim, count)
        if trim == 0:
            return buffers.mean([1.0] * count, count)
        kept = slice(trim, count - trim)
        return buffers.by_coordinate(lambda v: v[:, kept].mean(1, dtype=np.float64))

    def too_few(self, updates: int) -> str | None:
        trim = number_of(self.trim, updates)
        if updates > 2 * trim:
            return None
        return (
            f"TrimmedMean needs more than 2 b = {2 * trim} updates for b = {trim}, but there are "
            f"{updates}; {more_clients('trim', (updates - 1) // 2)}"
        )
