"""Rules that mix the clients' models into the global model, whatever their staleness.

Xie, Koyejo, Gupta 2019, Asynchronous Federated Optimization, arXiv:1903.03934, algorithm 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import CohortRule, Weighting
from flsuite.aggregators.rules.mean import Mean, Normalize, mixed
from flsuite.aggregators.staleness import Staleness, StalenessName, staleness_weight
from flsuite.common.arguments import Fraction, Settings, Share
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, cast


@dataclass(frozen=True)
class Mixing(CohortRule, Settings):
    """Mixes in the clients' models one after the other, ``w <- (1 - a) w + a w_k``.

    ``a = mixing * s(t_k) * q_k``. Floating-point buffers are mixed likewise, and integer counters
    take the maximum. ``a`` is logged as ``weight``.

    Args:
        mixing: The mixing rate. Multiplied by the weight of a fresh update, it must be at most 1.
        staleness: The weight ``s(t)`` of a client that is ``t`` versions late.
        weighting: With ``uniform``, ``q_k`` is 1. With ``samples``, it is the client's fraction of
            all training samples of the federation.
    """

    mixing: Fraction = 0.5
    staleness: StalenessName | Staleness = "polynomial"
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_mixture(f"{type(self).__name__}: mixing", self.mixing, self.staleness)

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        state = server.state
        for update in updates:
            rate = self.mixing * staleness_weight(self.staleness, update.staleness)
            rate *= self._share(update, server.layout.samples)
            new = {k: mixed(value, update.state[k], rate) for k, value in state.items()}
            state = cast(new, state)
            update.metrics["weight"] = rate
        return state

    def _share(self, update: ClientUpdate, samples: int) -> float:
        """Return ``q_k``.

        Raises:
            FederationError: If the client claims more samples than the federation has. The rate
                could then exceed 1.
        """
        if self.weighting == "uniform":
            return 1.0
        if update.samples > samples:
            raise FederationError(
                f"{type(self).__name__}: client {update.client} claims {update.samples} training "
                f"samples in round {update.round}, but the federation has {samples}; correct the "
                "client, or set weighting to 'uniform'"
            )
        return update.samples / samples


@dataclass(frozen=True)
class MixedMean(Mean):
    """Mixes in a buffer of models at a time, ``w <- w + rate sum q_k s(t_k) (w_k - w)``.

    It is the :class:`~flsuite.aggregators.Mean` of the clients' models instead of their changes,
    which only differ for late clients.

    Args:
        weighting: See :class:`~flsuite.aggregators.Mean`.
        staleness: The weight ``s(t)`` of a client that is ``t`` versions late.
        normalize: See :class:`~flsuite.aggregators.Mean`.
        rate: The mixing rate, from 0 to 1. Multiplied by the weight of a fresh update, it must be
            at most 1.
    """

    weighting: Weighting = "uniform"
    staleness: StalenessName | Staleness = "constant"
    normalize: Normalize = "buffer"
    rate: Share = 0.5

    rebases = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize == "buffer":
            _require_mixture(f"{type(self).__name__}: rate", self.rate, self.staleness)


def _require_mixture(name: str, rate: float, staleness: StalenessName | Staleness) -> None:
    """Refuse a mixing rate that exceeds 1 for a fresh update."""
    fresh = staleness_weight(staleness, 0)
    if rate * fresh > 1:
        raise FlsuiteError(
            f"{name} times the weight of a fresh update must be at most 1, got {rate} * {fresh}; "
            "lower one of them"
        )
