"""Gaussian noise: attackers send random parameters around their own."""

import torch

from flsuite.attacks.base import Attack, Attacker
from flsuite.errors import require_at_least
from flsuite.state import State

__all__ = ["GaussianNoise", "noisy"]


class GaussianNoise(Attack):
    """Attackers add noise to every parameter that they send (Blanchard et al. 2017).

    Args:
        clients: Numbers of the attackers.
        fraction: Share of the clients that attack, instead of ``clients``.
        std: Standard deviation of the noise, in the unit of the parameters. 0 is an honest update.
    """

    def __init__(
        self, clients: list[int] | None = None, fraction: float | None = None, std: float = 1.0
    ) -> None:
        super().__init__(clients, fraction)
        require_at_least(type(self).__name__, 0, std=std)
        self.std = std

    def alter(self, trained: State, received: State, attacker: Attacker) -> State:
        return noisy(trained, self.std, attacker.generator)


def noisy(state: State, std: float, generator: torch.Generator) -> State:
    """Return a copy of a state with independent normal noise of this deviation on every number."""
    if not std:
        return {name: value.clone() for name, value in state.items()}
    return {
        name: value + std * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in state.items()
    }
