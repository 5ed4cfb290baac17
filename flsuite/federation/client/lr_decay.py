"""Learning-rate decay from round to round.

Under heterogeneity, FedAvg with a constant learning rate does not converge to the optimum: the
remaining distance is of the order of the rate (Li et al. 2020, On the Convergence of FedAvg on
Non-IID Data, arXiv:1907.02189, section 4).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from flsuite.common.arguments import Fraction, PositiveInt, Settings


class LRDecay(ABC):
    """Multiplies the learning rates of all clients' optimizers by one factor per round.

    The factor depends only on the round, so a resumed or extended run continues as it would have
    without the interruption. Within a round, it is constant.
    """

    @abstractmethod
    def factor(self, round: int) -> float:
        """Return the factor of a round, above 0.

        Rounds count from 1.
        """


@dataclass(frozen=True)
class CosineDecay(LRDecay, Settings):
    """Half a cosine from 1 in the first round to ``final`` in round ``rounds + 1``, then constant.

    Args:
        rounds: Rounds over which the rate decays, usually ``trainer.rounds``.
        final: The factor at the end.
    """

    rounds: PositiveInt
    final: Fraction = 0.01

    def factor(self, round: int) -> float:
        # A run extended beyond ``rounds`` keeps the final factor.
        done = min((round - 1) / self.rounds, 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class ExponentialDecay(LRDecay, Settings):
    """``gamma`` to the power of the number of completed rounds.

    Args:
        gamma: Factor from one round to the next.
    """

    gamma: Fraction = 0.99

    def factor(self, round: int) -> float:
        return float(self.gamma ** (round - 1))


@dataclass(frozen=True)
class StepDecay(LRDecay, Settings):
    """A factor that is multiplied by ``gamma`` every ``every`` rounds.

    Args:
        every: Rounds between two steps.
        gamma: Factor per step.
    """

    every: PositiveInt
    gamma: Fraction = 0.1

    def factor(self, round: int) -> float:
        return float(self.gamma ** ((round - 1) // self.every))
