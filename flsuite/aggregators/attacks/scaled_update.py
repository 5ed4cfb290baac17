"""Scaled updates: an attacker replaces the global model by its own."""

from dataclasses import dataclass

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.state import State, add, difference


@dataclass(eq=False)
class ScaledUpdate(Attack):
    """Scales the attackers' change (Bagdasaryan et al. 2020, "How to backdoor federated learning").

    An attacker that received ``w`` and trained to ``w_k`` sends ``w + boost (w_k - w)``, as in the
    paper. If it has ``1 / boost`` of the mean's weight, and the other clients hardly change, the
    next global model is its own.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        boost: Factor of the change. 1 is an honest update.
    """

    boost: NonNegativeFloat = 10.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return boosted(trained, received, self.boost)


def boosted(trained: State, received: State, boost: float) -> State:
    """Return ``received + boost (trained - received)``, exactly ``trained`` for a boost of 1."""
    return add(trained, difference(trained, received), boost - 1)
