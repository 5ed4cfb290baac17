"""Krum and Multi-Krum: Blanchard et al. 2017, sections 3 and 5.

Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017,
arXiv:1703.02757.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.robust.base import Clients, ParameterRule, more_clients, number_of
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.vectors import squared_distances
from flsuite.common.arguments import PositiveInt


@dataclass(frozen=True)
class MultiKrum(ParameterRule):
    """The mean of the ``m`` models that are closest to their neighbors.

    The score of a client is the sum of the squared distances to its ``n - f - 2`` nearest others,
    and the ``m`` lowest scores win. Ties go to the lower client number. With ``m = n``, it is the
    plain mean.

    Logged are each client's ``krum_score`` and its ``weight``, ``1 / m`` or 0. A log line names
    clients without weight.

    Args:
        byzantine: Attackers to withstand, ``f``, as an integer, or their fraction in [0, 0.5) as a
            float. More than ``2 f + 2`` clients must come back.
        selected: Clients whose models count, ``m``. Default: ``n - f``.
    """

    byzantine: Clients = 0.2
    selected: PositiveInt | None = None

    def parameters(self, server: Server, cohort: Cohort) -> Tensor:
        count = len(cohort)
        byzantine = number_of(self.byzantine, count)
        scores = _krum_scores(squared_distances(cohort.parameters.gram()), byzantine)

        number = self.selected or count - byzantine
        chosen = set(torch.sort(scores, stable=True).indices[:number].tolist())
        weights = [float(k in chosen) for k in range(count)]
        cohort.note("krum_score", scores.tolist())
        cohort.note("weight", (weight / number for weight in weights))
        cohort.name_clients(self, "left out", set(range(count)) - chosen)
        return cohort.parameters.mean(weights, number)

    def too_few(self, updates: int) -> str | None:
        name, byzantine = type(self).__name__, number_of(self.byzantine, updates)
        remedy = more_clients("byzantine", (updates - 3) // 2)
        if updates <= 2 * byzantine + 2:
            return (
                f"{name} needs more than 2 f + 2 = {2 * byzantine + 2} updates for f = {byzantine} "
                f"attackers, but there are {updates}; {remedy}"
            )
        if updates < (self.selected or 0):
            return (
                f"{name} needs the {self.selected} updates that it selects, but there are "
                f"{updates}; {more_clients('selected', updates)}"
            )
        return None


@dataclass(frozen=True)
class Krum(MultiKrum):
    """The one model that is closest to its neighbors: Multi-Krum with ``m = 1``.

    The global model becomes a single client's model.

    Args:
        byzantine: See Multi-Krum.
    """

    selected: PositiveInt | None = field(default=1, init=False)


def _krum_scores(squares: Tensor, byzantine: int) -> Tensor:
    """Return the sum of the squared distances of each client to its ``n - f - 2`` nearest others.

    Args:
        squares: Squared distances ``(n, n)``.
        byzantine: The number of attackers, ``f``. ``n`` must be above ``f + 2``.
    """
    # Exclude the client itself, even if others are at distance 0.
    others = squares.clone().fill_diagonal_(-1.0).sort(1).values[:, 1:]
    return others[:, : len(squares) - byzantine - 2].sum(1)
