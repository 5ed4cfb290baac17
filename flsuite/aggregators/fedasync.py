"""FedAsync: Xie, Koyejo, Gupta 2019, algorithm 1.

Asynchronous Federated Optimization, arXiv:1903.03934.
"""

from collections.abc import Iterator
from typing import ClassVar, get_args

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.changes import mixed
from flsuite.aggregators.fedavg import Weighting
from flsuite.aggregators.staleness import (
    Staleness,
    StalenessName,
    require_mixture,
    require_staleness,
    staleness_weight,
)
from flsuite.errors import FederationError, require_fraction, require_one_of
from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = ["FedAsync"]


class FedAsync(Aggregator):
    """The server mixes each client's model into the global one as soon as it arrives.

    ``w <- (1 - a) w + a w_k`` with ``a = mixing * s(tau) * q_k``. Floating-point buffers mix alike,
    and integer counters take the maximum. The log has ``a`` as ``weight``.

    An aggregation of several updates mixes them in one after the other. The mixing is the server's
    part of the algorithm. Clients minimise their own loss, without the paper's proximal term.

    Args:
        mixing: The mixing rate, in (0, 1]. Times the weight of a fresh update it must be at most 1.
        staleness: The weight ``s(tau)`` of an update of staleness ``tau``. Default: the paper's
            polynomial with power 0.5.
        weighting: With ``uniform``, ``q_k`` is 1. With ``samples``, it is the client's share of all
            training samples of the federation. The rate per update is then about ``mixing`` divided
            by the number of clients.
    """

    accepts_stale: ClassVar[bool] = True

    def __init__(
        self,
        mixing: float = 0.5,
        staleness: StalenessName | Staleness = "polynomial",
        weighting: Weighting = "uniform",
    ) -> None:
        self.mixing = mixing
        self.staleness = staleness
        self.weighting = weighting
        require_fraction("FedAsync", mixing=mixing)
        require_staleness("FedAsync", staleness)
        require_mixture("FedAsync", staleness, mixing=mixing)
        require_one_of("FedAsync", get_args(Weighting), weighting=weighting)

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        state = global_state
        for update in updates:
            damping = staleness_weight(self.staleness, update.staleness)
            rate = self.mixing * damping * self._share(update)

            state = mixed(state, update.state, rate)
            update.metrics["weight"] = rate
        return state

    def _share(self, update: ClientUpdate) -> float:
        """Return ``q_k``.

        Raises:
            FederationError: If the client claims more samples than the federation has. The rate
                could then exceed 1.
        """
        if self.weighting == "uniform":
            return 1.0
        if update.samples > self.layout.samples:
            raise FederationError(
                f"FedAsync: client {update.client} claims {update.samples} training samples in "
                f"round {update.round}, and the federation has {self.layout.samples}; correct the "
                "client, or set weighting to 'uniform'"
            )
        return update.samples / self.layout.samples
