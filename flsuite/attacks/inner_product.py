"""Inner-product manipulation: attackers turn the mean against the honest direction."""

from typing import Literal

from flsuite.attacks.collusion import Collusion, Moments
from flsuite.errors import require_at_least, require_one_of
from flsuite.state import State

__all__ = ["InnerProduct"]


class InnerProduct(Collusion):
    """Attackers send the honest mean with the opposite sign (Xie et al. 2020, "Fall of empires").

    Every attacker sends ``-epsilon`` times the mean of the honest changes. With ``m`` attackers of
    ``n`` clients with equal weights, the inner product of the mean and the honest mean is negative
    if ``epsilon > (n - m) / m``. A small ``epsilon`` stays near honest updates and defeats rules
    that pick by distance. Attackers that know nobody send the model that they have received.

    Args:
        clients: Numbers of the attackers.
        fraction: Share of the clients that attack, instead of ``clients``.
        epsilon: Factor of the mean.
        knows: ``honest``, as in the paper, or ``attackers``: the mean is that of their own changes,
            trained honestly.
    """

    def __init__(
        self,
        clients: list[int] | None = None,
        fraction: float | None = None,
        epsilon: float = 0.5,
        knows: Literal["honest", "attackers"] = "honest",
    ) -> None:
        super().__init__(clients, fraction)
        require_at_least(type(self).__name__, 0, epsilon=epsilon)
        require_one_of(type(self).__name__, ("honest", "attackers"), knows=knows)
        self.epsilon = epsilon
        self.knows = knows

    def conspire(self, known: Moments, clients: int, attackers: int) -> State:
        return {name: mean.mul(-self.epsilon) for name, mean in known.mean().items()}
