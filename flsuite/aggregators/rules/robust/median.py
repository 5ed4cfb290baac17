"""Coordinate-wise median: Yin et al. 2018, definition 1 and algorithm 1, option I.

Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, arXiv:1803.01498.
"""

from dataclasses import dataclass

from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.robust.base import ParameterRule
from flsuite.aggregators.rules.robust.cohort import Cohort

__all__ = ["CoordinateMedian"]


@dataclass(frozen=True)
class CoordinateMedian(ParameterRule):
    """The median of the clients' models, coordinate by coordinate.

    Fewer than half of the clients cannot move a coordinate beyond the range of the others. For an
    even number of clients it is the mean of the two in the middle.

    No client is left out, so that the log has no weights. The models of a round are in memory at a
    time: for ``n`` clients of ``d`` parameters ``4 n d`` bytes.
    """

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        return cohort.parameters.median()
