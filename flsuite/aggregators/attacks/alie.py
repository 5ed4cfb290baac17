"""The attack "A little is enough", which hides within the spread of honest updates."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from flsuite.aggregators.attacks.collusion import Collusion
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.state import State, add

# The largest fraction of clients nearer to the mean. Without a bound, a majority of attackers
# would be infinitely far from the mean.
_MOST = 0.999


@dataclass(eq=False)
class ALittleIsEnough(Collusion):
    """Shifts the mean as far as the spread of the updates conceals it (Baruch et al. 2019).

    Every attacker sends ``mean + z std`` of the changes, coordinate by coordinate. Mean and
    standard deviation are computed from the attackers' own honestly trained changes. A single
    attacker sees no deviation, and sends its honest change.

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        z: Standard deviations from the mean. Default: ``z_max`` of the paper for the clients of the
            round, see :func:`largest_hidden`.
        knows: ``attackers``, as in the paper, or ``all``: compute the moments over all clients.
    """

    z: NonNegativeFloat | None = None
    knows: Literal["attackers", "all"] = "attackers"

    def line(self, clients: int) -> str:
        line, attackers = super().line(clients), len(self.attackers)
        if attackers == 1 and self.knows == "attackers":
            return f"{line}; one attacker sees no deviation and sends its honest change: name more"
        if self.z is not None or not attackers or largest_hidden(clients, attackers):
            return line
        return f"{line}; the paper's z is 0 for so few, which is the mean of their changes: set z"

    def conspire(self, mean: State, std: State, clients: int, attackers: int) -> State:
        z = largest_hidden(clients, attackers) if self.z is None else self.z
        return add(mean, std, z)


def largest_hidden(clients: int, attackers: int) -> float:
    """Return ``z_max``, the largest deviation at which honest clients still support the attackers.

    With ``s = floor(n / 2 + 1) - m`` supporters needed, it is the largest ``z`` with
    ``phi(z) < (n - m - s) / (n - m)``, where ``phi`` is the normal CDF. It is 0 if the right-hand
    side is below one half, as for few attackers, and at most 3.09, which a majority of attackers
    reaches.

    Args:
        clients: Clients of the round, ``n``.
        attackers: Attackers among them, ``m``.
    """
    honest, supporters = clients - attackers, clients // 2 + 1 - attackers
    share = (honest - supporters) / honest if honest else 1.0
    return NormalDist().inv_cdf(min(max(share, 0.5), _MOST))
