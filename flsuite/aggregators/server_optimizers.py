"""Server optimizers: the clients' mean change is a pseudo-gradient.

FedAvgM: Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, arXiv:1909.06335, section 4.3. FedAdagrad, FedYogi, FedAdam: Reddi et al.
2021, Adaptive Federated Optimization, arXiv:2003.00295, algorithm 2.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from flsuite.aggregators.changes import MeanChange
from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.aggregators.staleness import (
    Staleness,
    StalenessName,
    require_staleness,
    staleness_weight,
)
from flsuite.errors import require_below_one, require_positive
from flsuite.messages import ClientUpdate
from flsuite.state import State

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"]


class ServerOptimizer(FedAvg):
    """FedAvg's mean as a direction.

    Parameters move by :meth:`step`, and buffers take the mean.

    Updates may be stale. The pseudo-gradient is then that of FedBuff,
    ``sum q_k s(tau_k) (w_k - base_k)``, and buffers move by this change. It holds what the clients
    have learned. Their models less the global one would also hold, with the opposite sign, what the
    server has learned meanwhile. Three things remain:

    - A change is a direction at an older model. ``s`` makes it smaller, not less biased.
    - Late changes act like momentum. With long delays, lower the momentum or ``beta1``.
    - The adaptive methods divide by the size of recent changes, so that damping which all of them
      share cancels from the step. It acts on an update that is older than most. With long delays,
      lower ``lr``.

    Args:
        lr: The server's learning rate.
        weighting: As for FedAvg.
        staleness: The weight ``s(tau)`` of an update of staleness ``tau``. Default: FedBuff's. A
            fresh update has the weight 1, so that rounds in lockstep are those of the papers.
    """

    accepts_stale: ClassVar[bool] = True

    def __init__(
        self, lr: float, weighting: Weighting, staleness: StalenessName | Staleness = "polynomial"
    ) -> None:
        super().__init__(weighting)
        self.lr = lr
        self.staleness = staleness
        require_positive(type(self).__name__, lr=lr)
        require_staleness(type(self).__name__, staleness)

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        changes = MeanChange(global_state, self.layout.parameters)
        for update in updates:
            damping = staleness_weight(self.staleness, update.staleness)
            changes.add(update.state, update.base, self.weight(update), damping)

        # Buffers are statistics and counters, no direction to step along: they keep the mean. Where
        # nothing is damped it is FedAvg's, counters included.
        undamped = changes.damping == 1.0
        mean = changes.mean() if undamped else changes.applied(changes.damping)
        return self.from_mean(global_state, mean, ())

    def from_mean(self, global_state: State, mean: State, updates: Sequence[ClientUpdate]) -> State:
        new = dict(mean)
        for name in self.layout.parameters:
            delta = mean[name] - global_state[name]
            new[name] = global_state[name] + self.step(name, delta)
        return new

    def slot(self, kind: str, name: str, like: Tensor, value: float = 0.0) -> Tensor:
        """Return the accumulator of a parameter, created on first use."""
        # In the memory, so that a checkpoint holds the accumulators.
        slots = self.memory.setdefault(kind, {})
        if name not in slots:
            slots[name] = torch.full_like(like, value)
        return slots[name]

    @abstractmethod
    def step(self, name: str, delta: Tensor) -> Tensor:
        """Return the change of parameter ``name``, given the clients' mean change ``delta``."""


class FedAvgM(ServerOptimizer):
    """Server momentum, ``v <- momentum * v + delta``, ``w <- w + lr * v``.

    Args:
        lr: The server's learning rate. With 1 and momentum 0 this is FedAvg.
        momentum: In [0, 1).
        weighting: As for FedAvg.
        staleness: The weight of an update that is late.
    """

    def __init__(
        self,
        lr: float = 1.0,
        momentum: float = 0.9,
        weighting: Weighting = "samples",
        staleness: StalenessName | Staleness = "polynomial",
    ) -> None:
        super().__init__(lr, weighting, staleness)
        self.momentum = momentum
        require_below_one("FedAvgM", momentum=momentum)

    def step(self, name: str, delta: Tensor) -> Tensor:
        # In place, on the memory.
        velocity = self.slot("velocity", name, delta).mul_(self.momentum).add_(delta)
        return self.lr * velocity


class Adaptive(ServerOptimizer):
    """Algorithm 2: ``w <- w + lr m / (sqrt(v) + tau)``.

    The first moment is ``m <- beta1 m + (1 - beta1) delta``. The subclass updates ``v``. As in the
    paper there is no bias correction, and ``v`` starts at ``tau ** 2``.

    Args:
        lr: The server's learning rate, eta.
        beta1: Decay of the first moment, in [0, 1).
        tau: Adaptivity, above 0. A larger one is closer to plain momentum.
        weighting: As for FedAvg.
        staleness: The weight of an update that is late.
    """

    def __init__(
        self,
        lr: float,
        beta1: float,
        tau: float,
        weighting: Weighting,
        staleness: StalenessName | Staleness = "polynomial",
    ) -> None:
        super().__init__(lr, weighting, staleness)
        self.beta1 = beta1
        self.tau = tau
        require_below_one(type(self).__name__, beta1=beta1)
        require_positive(type(self).__name__, tau=tau)

    def step(self, name: str, delta: Tensor) -> Tensor:
        first = self.slot("m", name, delta).mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        second = self.slot("v", name, delta, self.tau**2)  # the paper's start
        self.update_second(second, delta.square())
        # No bias correction, as in the paper: v starts above zero.
        return self.lr * first / (second.sqrt() + self.tau)

    @abstractmethod
    def update_second(self, v: Tensor, square: Tensor) -> None:
        """Fold ``delta ** 2`` into the second moment, in place."""


class FedAdagrad(Adaptive):
    """The adaptive optimizer with ``v <- v + delta^2``."""

    def __init__(
        self,
        lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        weighting: Weighting = "samples",
        staleness: StalenessName | Staleness = "polynomial",
    ) -> None:
        super().__init__(lr, beta1, tau, weighting, staleness)

    def update_second(self, v: Tensor, square: Tensor) -> None:
        v.add_(square)


class _SecondMoment(Adaptive):
    """The adaptive optimizers whose second moment decays, by ``beta2`` in [0, 1)."""

    def __init__(
        self,
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        weighting: Weighting = "samples",
        staleness: StalenessName | Staleness = "polynomial",
    ) -> None:
        super().__init__(lr, beta1, tau, weighting, staleness)
        self.beta2 = beta2
        require_below_one(type(self).__name__, beta2=beta2)


class FedAdam(_SecondMoment):
    """The adaptive optimizer with ``v <- beta2 v + (1 - beta2) delta^2``."""

    def update_second(self, v: Tensor, square: Tensor) -> None:
        v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)


class FedYogi(_SecondMoment):
    """The adaptive optimizer with ``v <- v - (1 - beta2) delta^2 sign(v - delta^2)``."""

    def update_second(self, v: Tensor, square: Tensor) -> None:
        v.sub_((1 - self.beta2) * square * torch.sign(v - square))
