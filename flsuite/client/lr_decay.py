"""Learning rates that fall from round to round: under heterogeneity, FedAvg with a constant one does not converge.

Li et al. 2020, On the Convergence of FedAvg on Non-IID Data, arXiv:1907.02189, section 4: the distance that remains is of the
order of the rate.
"""

import math
from abc import ABC, abstractmethod

from flsuite.errors import require_at_least, require_fraction

__all__ = ["CosineDecay", "ExponentialDecay", "LRDecay", "StepDecay"]


class LRDecay(ABC):
    """Scales the learning rates of all clients' optimizers by one factor a round; within a round they are constant.

    A function of the round alone, so that a resumed run, and one that is extended, goes on as it would have.
    """

    @abstractmethod
    def factor(self, round: int) -> float:
        """By what the model's own learning rates are multiplied in ``round``, counted from 1; above 0."""


class CosineDecay(LRDecay):
    """From 1 in the first round along half a cosine to ``final`` in round ``rounds + 1``, and constant from there.

    Args:
        rounds: Rounds over which the rate falls: as a rule ``trainer.rounds``.
        final: What is left in the end, as a fraction.
    """

    def __init__(self, rounds: int, final: float = 0.01) -> None:
        require_at_least("CosineDecay", 1, rounds=rounds)
        require_fraction("CosineDecay", final=final)
        self.rounds = rounds
        self.final = final

    def factor(self, round: int) -> float:
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
    """Constant for ``every`` rounds, then ``gamma`` of that for as many, and so on.

    Args:
        every: Rounds between two steps.
        gamma: Factor of a step.
    """

    def __init__(self, every: int, gamma: float = 0.1) -> None:
        require_at_least("StepDecay", 1, every=every)
        require_fraction("StepDecay", gamma=gamma)
        self.every = every
        self.gamma = gamma

    def factor(self, round: int) -> float:
        return float(self.gamma ** ((round - 1) // self.every))
