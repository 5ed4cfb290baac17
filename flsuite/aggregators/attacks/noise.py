"""Gaussian noise: attackers send random parameters around their own."""

from dataclasses import dataclass

import torch

from flsuite.aggregators.attacks.base import Attack
from flsuite.aggregators.transforms.base import FitView
from flsuite.common.arguments import NonNegativeFloat
from flsuite.common.state import State


@dataclass(eq=False)
class GaussianNoise(Attack):
    """Adds noise to every parameter that is sent (Blanchard et al. 2017).

    Args:
        clients: Numbers of the attackers.
        fraction: Fraction of the clients that attack, instead of ``clients``.
        std: Standard deviation of the noise, in the unit of the parameters. 0 is an honest update.
    """

    std: NonNegativeFloat = 1.0

    def alter(self, trained: State, received: State, fit: FitView) -> State:
        return noisy(trained, self.std, fit)


def noisy(state: State, std: float, fit: FitView) -> State:
    """Return a copy of a state with i.i.d. normal noise of standard deviation ``std``."""
    if not std:
        return {name: value.clone() for name, value in state.items()}
    generator = fit.generator("attack/update")  # honest clients never draw from this stream
    return {
        name: value + std * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for name, value in state.items()
    }
