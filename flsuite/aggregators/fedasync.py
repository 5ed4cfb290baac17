"""FedAsync: Xie, Koyejo, Gupta 2019, algorithm 1.

Asynchronous Federated Optimization, arXiv:1903.03934.
"""

from typing import Any

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.rules.base import Weighting
from flsuite.aggregators.rules.mean import Mixing
from flsuite.aggregators.staleness import Staleness, StalenessName
from flsuite.common.arguments import Fraction


class FedAsync(Aggregator):
    """The server mixes each client's model into the global one as soon as it arrives.

    This is the rule :class:`~flsuite.aggregators.Mixing`. Add the objective
    :class:`~flsuite.aggregators.Proximal` for the paper's proximal term.

    Args:
        mixing: The mixing rate, in (0, 1]. Multiplied by the weight of a fresh update, it must be
            at most 1.
        staleness: The weight ``s(tau)`` of an update of staleness ``tau``. Default: the paper's
            polynomial with power 0.5.
        weighting: With ``uniform``, all updates count equally. With ``samples``, the rate per
            update is about ``mixing`` divided by the number of clients.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(
        self,
        mixing: Fraction = 0.5,
        staleness: StalenessName | Staleness = "polynomial",
        weighting: Weighting = "uniform",
        **kwargs: Any,
    ) -> None:
        self.mixing, self.staleness, self.weighting = mixing, staleness, weighting
        super().__init__(rule=Mixing(mixing, staleness, weighting), **kwargs)
