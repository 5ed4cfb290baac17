"""Sign flipping: attackers undo what they have learned."""

from flsuite.attacks.base import Attack, Attacker
from flsuite.errors import require_at_least
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
        fraction: float | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(clients, fraction)
        require_at_least(type(self).__name__, 0, scale=scale)
        self.scale = scale

    def alter(self, trained: State, received: State, attacker: Attacker) -> State:
        return add(received, difference(trained, received), -self.scale)
