"""Inner-product manipulation: attackers turn the mean against the honest direction."""

from dataclasses import dataclass
from typing import Literal

from flsuite.aggregators.attacks.collusion import Collusion
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.state import State


@dataclass(eq=False)
class InnerProduct(Collusion):
    """Sends the honest mean with the opposite sign (Xie et al. 2020, "Fall of empires").

    Every attacker sends ``-epsilon`` times the mean of the honest changes. With ``m`` attackers of
    ``n`` equally weighted clients, the inner product of the mean and the honest mean is negative if
    ``epsilon > (n - m) / m``. A small ``epsilon`` stays near honest updates and defeats rules that
    select by distance. Attackers that know no client send the model that they received.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        epsilon: Factor of the mean.
        knows: ``honest``, as in the paper, or ``attackers``: use the mean of their own changes,
            trained honestly.
    """

    epsilon: NonNegativeFloat = 0.5
    knows: Literal["honest", "attackers"] = "honest"

    def conspire(self, mean: State, std: State, clients: int, attackers: int) -> State:
        return {name: value.mul(-self.epsilon) for name, value in mean.items()}
