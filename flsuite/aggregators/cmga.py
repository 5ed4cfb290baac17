"""CMGA, Constrained Momentum Gaussian Aggregation: networks and class priors, each by its own rule.

Source: the description of CMGA for the federated adaptive conditional VAE (F-ACVAE), mechanisms 1
to 5. Each is one function here, in that order.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flsuite.aggregators.class_means import HolderMean, directions, smallest_distance
from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.errors import FlsuiteError, require_at_least, require_below_one, require_positive
from flsuite.messages import ClientUpdate
from flsuite.state import RunningMean, State

__all__ = ["CMGA", "class_momentum", "floor_sigma", "move_weights", "select", "separate"]

MEANS, LOG_VARIANCES = "prior_mean", "prior_log_variance"
"""The groups of parameters that a model declares, each one tensor ``(classes, latent)``."""


class CMGA(FedAvg):
    """A mean change of the networks, and a momentum of each class prior over the class's holders.

    The model declares its priors as the groups ``prior_mean`` and ``prior_log_variance``, and keeps
    its encoder private. A client holds a class if its class counts, which travel with its update,
    are above zero. The log variance of a class is the mean over its holders too: a client without
    samples of a class has learned nothing about it.

    With shared encoders, ``beta``, ``separation_weight`` and ``sigma_floor`` at 0, and classes that
    every client holds, this is FedAvg with the plain mean.

    Logged as ``train/<name>``:

    - ``prior_distance_before`` and ``prior_distance_after``: the smallest distance between two
      class centres before and after the separation;
    - ``prior_sigma_floored``: the number of standard deviations that were raised;
    - ``prior_drift/<class>``: the distance of a class's observed mean from its momentum.

    Args:
        lr: The server's learning rate, eta.
        beta: Momentum of the class centres, in [0, 1).
        delta: Distance between two centres below which they repel each other.
        separation_weight: lambda, the strength of the repulsion. A centre moves by at most this
            much per centre that is too near.
        separation_steps: Gradient steps of the separation. The description takes 3, and 0 turns it
            off. Each step starts from the unseparated centres, so a pair that one step takes beyond
            delta returns with the next. An odd number therefore ends with the pair apart.
        sigma_floor: Smallest standard deviation of a prior.
        weighting: ``uniform`` is the description's mean. ``samples`` weights networks by training
            samples, and a class's prior by the samples of the class.
    """

    def __init__(
        self,
        lr: float = 1.0,
        beta: float = 0.9,
        delta: float = 2.0,
        separation_weight: float = 0.1,
        separation_steps: int = 3,
        sigma_floor: float = 0.1,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(weighting)
        self.lr = lr
        self.beta = beta
        self.delta = delta
        self.separation_weight = separation_weight
        self.separation_steps = separation_steps
        self.sigma_floor = sigma_floor
        self._check_arguments()

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        means, log_variances = self._entry(MEANS), self._entry(LOG_VARIANCES)
        networks, centres, spreads = RunningMean(), HolderMean(), HolderMean()
        for update in updates:
            weights, priors = select(update.state, (means, log_variances))
            networks.add(weights, self.weight(update))
            counts = update.class_counts
            # A client weighs in a class's prior only if it holds the class.
            share = counts if self.weighting == "samples" else counts > 0
            centres.add(priors[means], share)
            spreads.add(priors[log_variances], share)

        # The order matters: the memory keeps the centres before separation.
        new = move_weights(global_state, networks.mean(), self.layout.parameters, self.lr)
        momentum = self._momentum(centres, global_state[means])
        new[means] = separate(momentum, self.delta, self.separation_weight, self.separation_steps)
        spread = spreads.mean(otherwise=global_state[log_variances])
        new[log_variances] = floor_sigma(spread, self.sigma_floor)

        self.metrics["prior_sigma_floored"] = float((new[log_variances] > spread).sum())
        self._report(momentum, new[means], centres)
        return new

    def _momentum(self, centres: HolderMean, current: Tensor) -> Tensor:
        """Apply mechanism 3 to the memory: the unseparated centres, and the classes seen so far."""
        never = {"centres": current, "seen": torch.zeros(len(current), dtype=torch.bool)}
        before = self.memory.get("momentum", never)
        # A class that no client of the round holds has no observation. Its row is ignored below.
        observed = centres.mean(before["centres"])
        momentum = class_momentum(
            before["centres"], before["seen"], observed, centres.held, self.beta
        )
        self.memory["momentum"] = {"centres": momentum, "seen": before["seen"] | centres.held}
        return momentum

    def _report(self, momentum: Tensor, new: Tensor, centres: HolderMean) -> None:
        self.metrics["prior_distance_before"] = smallest_distance(momentum)
        self.metrics["prior_distance_after"] = smallest_distance(new)
        # Only for classes that are held: the drift of the others is 0 by construction.
        drift = (centres.mean(momentum) - momentum).norm(dim=1).tolist()
        for c in centres.held.nonzero().flatten().tolist():
            self.metrics[f"prior_drift/{c}"] = drift[c]

    def _entry(self, group: str) -> str:
        """Return the name of the one entry of a group."""
        names = self.layout.groups.get(group, ())
        if len(names) != 1:
            raise FlsuiteError(
                f"CMGA aggregates class priors, and this model shares {len(names)} entries in the "
                f"group {group!r}; use a model with parameter_groups {MEANS} and {LOG_VARIANCES} "
                "of one tensor (classes, latent) each, such as ACVAE, or another aggregator"
            )
        return names[0]

    def _check_arguments(self) -> None:
        require_positive("CMGA", lr=self.lr)
        require_at_least("CMGA", 0, delta=self.delta, separation_weight=self.separation_weight)
        require_at_least("CMGA", 0, separation_steps=self.separation_steps)
        require_at_least("CMGA", 0, sigma_floor=self.sigma_floor)
        require_below_one("CMGA", beta=self.beta)


def select(state: Mapping[str, Tensor], priors: tuple[str, ...]) -> tuple[State, State]:
    """Split the shared entries into networks and priors (mechanism 1).

    The encoder is private, so it is in neither.
    """
    networks = {name: value for name, value in state.items() if name not in priors}
    return networks, {name: state[name] for name in priors}


def move_weights(
    theta: Mapping[str, Tensor], mean: State, parameters: tuple[str, ...], lr: float
) -> State:
    """Return ``theta + lr mean_k(theta_k - theta)`` for parameters (mechanism 2).

    Buffers take the mean.
    """
    # The rate is for parameters: a running statistic has no direction to step along.
    trained = set(parameters)
    return {
        name: torch.lerp(theta[name], value, lr) if name in trained else value
        for name, value in mean.items()
    }


def class_momentum(
    momentum: Tensor, seen: Tensor, observed: Tensor, held: Tensor, beta: float
) -> Tensor:
    """Return ``beta m + (1 - beta) observed`` for the classes that are held (mechanism 3).

    The other classes keep ``m``. A class that is held for the first time starts at its observed
    centre: it has no past to average with.

    Args:
        momentum: ``m``, ``(classes, latent)``.
        seen: Classes held in an earlier round, bool ``(classes,)``.
        observed: Mean centres over the holders, ``(classes, latent)``. Rows of other classes are
            ignored.
        held: Classes held by a client of this round, bool ``(classes,)``.
        beta: In [0, 1).
    """
    # No momentum for a class without a past.
    keep = torch.where(seen, beta, 0.0).to(momentum.dtype)[:, None]
    return torch.where(held[:, None], keep * momentum + (1 - keep) * observed, momentum)


def separate(centres: Tensor, delta: float, weight: float, steps: int) -> Tensor:
    """Separate the centres by gradient steps of length one, all classes at once (mechanism 4).

    The objective of a class is
    ``1/2 ||mu_c - m_c||^2 + weight sum_{j != c} max(0, delta - ||mu_c - mu_j||)``, and the start
    ``mu = m``. The first term pulls back as hard as a neighbour pushes at distance ``weight``, so
    delta is encouraged, not enforced.

    Args:
        centres: ``m``, ``(classes, latent)``, finite.
        delta: Distance below which two centres repel each other.
        weight: lambda.
        steps: Number of gradient steps.
    """
    moved = centres
    for _ in range(steps):
        towards, distance = directions(moved)
        # A unit vector per neighbour within delta: the gradient of the hinge does not depend on the
        # distance.
        push = (towards * (distance < delta).unsqueeze(-1)).sum(1)
        # mu - gradient, where the gradient is (mu - m) - weight push: mu cancels.
        moved = centres + weight * push
    return moved.clone()


def floor_sigma(log_variance: Tensor, floor: float) -> Tensor:
    """Raise standard deviations below ``floor`` to it (mechanism 5)."""
    # log sigma^2 = 2 log sigma. A floor of 0 has no logarithm.
    return log_variance.clamp(min=2 * math.log(floor)) if floor > 0 else log_variance
