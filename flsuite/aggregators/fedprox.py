"""FedProx: Li et al. 2020, algorithm 2.

Federated Optimization in Heterogeneous Networks, arXiv:1812.06127.
"""

from typing import Any

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Proximal
from flsuite.aggregators.rules.base import Weighting
from flsuite.common.arguments import NonNegativeFloat


class FedProx(FedAvg):
    """FedAvg with a :class:`~flsuite.aggregators.Proximal` term.

    Args:
        mu: Weight of the proximal term. With 0 this is FedAvg.
        weighting: See FedAvg.
        kwargs: See FedAvg.
    """

    def __init__(
        self, mu: NonNegativeFloat = 0.01, weighting: Weighting = "samples", **kwargs: Any
    ) -> None:
        self.mu = mu
        super().__init__(weighting=weighting, objective=Proximal(mu), **kwargs)
