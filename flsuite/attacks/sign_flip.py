"""Sign flipping: attackers undo what they have learned."""

from flsuite.arguments import NonNegativeFloat, Share
from flsuite.attacks.base import Attack, Attacker
from flsuite.state import State, add, difference

__all__ = ["SignFlip"]


class SignFlip(Attack):
    """Attackers send their change with the opposite sign (Li et al. 2019, RSA).

    An attacker that received ``w`` and trained to ``w_k`` sends ``w - scale (w_k - w)``.

    Args:
        clients: Numbers of the attackers.
        fraction: Share of the clients that attack, instead of ``clients``.
        scale: Factor of the change.
    """

    def __init__(
        self,
        clients: list[int] | None = None,
        fraction: Share | None = None,
        scale: NonNegativeFloat = 1.0,
    ) -> None:
        self.scale = scale
        super().__init__(clients, fraction)

    def alter(self, trained: State, received: State, attacker: Attacker) -> State:
        return add(received, difference(trained, received), -self.scale)
