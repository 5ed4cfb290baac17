"""Staleness: weights of late updates, and rebasing them on the current global model.

The staleness ``tau`` of an update is the number of aggregations between the version that its client
started from and its arrival. Constant, polynomial and hinge weights: Xie et al. 2019, Asynchronous
Federated Optimization, arXiv:1903.03934.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate


class Staleness(ABC):
    """The weight ``s(tau)`` of an update. It must not increase with the staleness."""

    @abstractmethod
    def __call__(self, tau: int) -> float:
        """Return the weight of an update of staleness ``tau``, at least 0.

        An update of weight 0 is ignored.
        """


class Constant(Staleness):
    """The weight 1 for every update, whatever its staleness.

    Take it if late updates should count in full.
    """

    def __call__(self, tau: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Hyperbolic(Staleness, Settings):
    """The weight ``c / (tau + 1)``.

    Take it if late updates should count for little.

    Args:
        c: Weight of a fresh update.
    """

    c: PositiveFloat = 1.0

    def __call__(self, tau: int) -> float:
        return self.c / (tau + 1)


@dataclass(frozen=True)
class Polynomial(Staleness, Settings):
    """The weight ``(tau + 1)^-p``.

    Take it first: it is the default of FedAsync and FedBuff.

    Args:
        p: Power, at least 0. With the default of 0.5 this is the ``1 / sqrt(1 + tau)`` of FedBuff.
    """

    p: NonNegativeFloat = 0.5

    def __call__(self, tau: int) -> float:
        return float(tau + 1) ** -self.p


@dataclass(frozen=True)
class Hinge(Staleness, Settings):
    """The weight 1 up to a staleness of ``b``, and ``1 / (a (tau - b) + 1)`` beyond.

    Take it if updates may be somewhat late without loss.

    Args:
        a: Slope beyond ``b``, above 0.
        b: Staleness up to which an update counts in full.
    """

    a: PositiveFloat = 10.0
    b: NonNegativeFloat = 4.0

    def __call__(self, tau: int) -> float:
        return 1.0 if tau <= self.b else 1 / (self.a * (tau - self.b) + 1)


StalenessName = Literal["constant", "hyperbolic", "polynomial", "hinge"]

_NAMED: dict[str, Staleness] = {
    "constant": Constant(),
    "hyperbolic": Hyperbolic(),
    "polynomial": Polynomial(),
    "hinge": Hinge(),
}


def staleness_weight(staleness: StalenessName | Staleness, tau: int) -> float:
    """Return the weight of an update of staleness ``tau``.

    Args:
        staleness: The weights, or the name of a class above with its defaults.
        tau: Aggregations since the version that the update started from.

    Raises:
        FlsuiteError: If the weight is below 0 or above that of a fresh update.
    """
    weights = _NAMED[staleness] if isinstance(staleness, str) else staleness
    weight, fresh = float(weights(tau)), float(weights(0))

    # A user's weights may increase. A mixture would then extrapolate beyond its models.
    if not 0 <= weight <= fresh:
        raise FlsuiteError(
            f"{type(weights).__name__}: the weight at staleness {tau} is {weight}; return one from "
            f"0 to the weight of a fresh update, {fresh}"
        )
    return weight


def rebased(update: ClientUpdate, server: Server) -> ClientUpdate:
    """Return an update whose state is ``w + (w_k - base_k)``, in float64 unless it is fresh.

    A floating-point buffer that is positive in ``w`` and in ``w_k``, such as a variance, stays
    positive. Integer counters take the maximum.
    """
    if not update.state or not update.base or update.base is server.state:
        return update
    parameters = frozenset(server.layout.parameters)
    moved = {
        name: _moved(value, server.state[name], update.base[name], name in parameters)
        for name, value in update.state.items()
    }
    return replace(update, state=moved)


def _moved(value: Tensor, now: Tensor, base: Tensor, is_parameter: bool) -> Tensor:
    # The counter of an old model must not reset the global counter.
    if not value.is_floating_point():
        return torch.maximum(value, now)
    moved = value.double() + (now.double() - base.double())
    if is_parameter:
        return moved
    # Otherwise, several clients that each lower the same variance would make it negative, and
    # BatchNorm would return NaN.
    smaller = torch.minimum(value.double(), now.double())
    return torch.where((smaller > 0) & (moved <= 0), smaller, moved)
