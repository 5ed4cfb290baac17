"""Sign flipping: attackers send the opposite of their change."""

from dataclasses import dataclass

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.state import State, add, difference


@dataclass(eq=False)
class SignFlip(Attack):
    """Sends the change with the opposite sign (Li et al. 2019, RSA).

    An attacker that received ``w`` and trained to ``w_k`` sends ``w - scale (w_k - w)``.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        scale: Factor of the change.
    """

    scale: NonNegativeFloat = 1.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return add(received, difference(trained, received), -self.scale)
