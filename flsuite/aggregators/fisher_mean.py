"""The Fisher-weighted mean of one parameter, for :mod:`~flsuite.aggregators.fisher`."""

import torch
from torch import Tensor

__all__ = ["FisherMean"]


class FisherMean:
    """The mean of a parameter over clients, weighted elementwise by Fisher, in float64.

    Updates arrive one at a time, and none is kept. The sums are over distances to the start of the
    fits. These are small, so little is lost to rounding.

    Args:
        start: The parameter before the clients' fits.
    """

    def __init__(self, start: Tensor) -> None:
        self.start = start.double()
        self.fisher = torch.zeros_like(self.start)
        self.moved = torch.zeros_like(self.start)
        self.plain = torch.zeros_like(self.start)
        self.square = self.mass = torch.zeros((), dtype=torch.float64)
        self.count = 0

    def add(self, value: Tensor, fisher: Tensor, weight: float) -> None:
        """Add a client's parameter and its Fisher diagonal, which counts ``weight`` times."""
        distance, fisher = value.double() - self.start, fisher.double()
        self.fisher.add_(fisher, alpha=weight)
        self.moved.addcmul_(fisher, distance, value=weight)
        self.plain += distance
        self.square = self.square + distance.square().sum()
        self.mass = self.mass + fisher.sum()
        self.count += 1

    def mean(self, damping: float, otherwise: Tensor) -> Tensor:
        """Return ``sum F_k theta_k / sum F_k``, in the dtype of ``otherwise``.

        Where the sum of the Fishers is not above ``damping``, it is the value of ``otherwise``.
        """
        known = self.fisher > damping
        # Divide by 1 elsewhere: 0 / 0 would be NaN even where it is not chosen.
        merged = self.start + self.moved / torch.where(known, self.fisher, 1.0)
        return torch.where(known, merged.to(otherwise.dtype), otherwise)

    def squared_distance(self, new: Tensor) -> float:
        """Return the mean over clients of ``||theta_k - new||^2``."""
        # ||theta_k - new||^2 expanded around the start, because the theta_k are not kept.
        moved = new.double() - self.start
        return float(
            (self.square - 2 * (self.plain * moved).sum()) / self.count + moved.square().sum()
        )
