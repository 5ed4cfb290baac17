"""Learning rates that fall from round to round.

Under heterogeneity FedAvg with a constant learning rate does not converge to the optimum: the
distance that remains is of the order of the rate (Li et al. 2020, On the Convergence of FedAvg on
Non-IID Data, arXiv:1907.02189, section 4).
"""

import math
from abc import ABC, abstractmethod

from flsuite.errors import require_at_least, require_fraction

__all__ = ["CosineDecay", "ExponentialDecay", "LRDecay", "StepDecay"]


class LRDecay(ABC):
    """Multiplies the learning rates of all clients' optimizers by one factor per round.

    The factor depends on the round alone, so that a resumed or extended run goes on as it would
    have without the interruption. Within a round it is constant.
    """

    @abstractmethod
    def factor(self, round: int) -> float:
        """Return the factor of a round, above 0.

        Rounds count from 1.
        """


class CosineDecay(LRDecay):
    """Half a cosine from 1 in the first round to ``final`` in round ``rounds + 1``, then constant.

    Args:
        rounds: Rounds over which the rate falls, as a rule ``trainer.rounds``.
        final: The factor at the end.
    """

    def __init__(self, rounds: int, final: float = 0.01) -> None:
        require_at_least("CosineDecay", 1, rounds=rounds)
        require_fraction("CosineDecay", final=final)
        self.rounds = rounds
        self.final = final

    def factor(self, round: int) -> float:
        # A run that is extended beyond ``rounds`` keeps the final factor.
        done = min((round - 1) / self.rounds, 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


class ExponentialDecay(LRDecay):
    """``gamma`` to the power of the rounds done.

    Args:
        gamma: Factor from one round to the next.
    """

    def __init__(self, gamma: float = 0.99) -> None:
        require_fraction("ExponentialDecay", gamma=gamma)
        self.gamma = gamma

    def factor(self, round: int) -> float:
        return float(self.gamma ** (round - 1))


class StepDecay(LRDecay):
    """Constant for ``every`` rounds, then multiplied by ``gamma``, and so on.

    Args:
        every: Rounds between two steps.
        gamma: Factor per step.
    """

    def __init__(self, every: int, gamma: float = 0.1) -> None:
        require_at_least("StepDecay", 1, every=every)
        require_fraction("StepDecay", gamma=gamma)
        self.every = every
        self.gamma = gamma

    def factor(self, round: int) -> float:
        return float(self.gamma ** ((round - 1) // self.every))
