"""CMGA, Constrained Momentum Gaussian Aggregation: a mean of networks that treats class-conditional Gaussian priors apart.

Source: the description of CMGA for the federated adaptive conditional VAE (F-ACVAE), its mechanisms 1 to 5. Each is one
function here, in its order.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.errors import FlsuiteError, require_at_least, require_positive
from flsuite.messages import ClientUpdate
from flsuite.state import RunningMean, State

__all__ = ["CMGA", "class_momentum", "floor_sigma", "move_weights", "select", "separate"]

MEANS, LOG_VARIANCES = "prior_mean", "prior_log_variance"
"""The groups of parameters that a model declares: each one tensor ``(classes, latent)``."""


class CMGA(FedAvg):
    """Networks move by the mean change; a class's prior by a momentum over the clients that hold the class.

    The model declares its priors as the groups ``prior_mean`` and ``prior_log_variance``, and keeps its encoder private.
    A client holds a class if its class counts, which travel with its update, are above zero. The log variance of a class is
    the mean over its holders too: a client without samples of a class has learned nothing about it. With the encoders
    shared, ``beta`` 0, ``separation_weight`` 0, ``sigma_floor`` 0 and classes that everybody holds, this is FedAvg with the
    plain mean.

    Logged, as ``train/<name>``: ``prior_distance_before`` and ``prior_distance_after``, the smallest distance between two
    class centres on either side of the separation; ``prior_sigma_floored``, how many deviations were raised;
    ``prior_drift/<class>``, how far the observed mean of a class lies from its momentum.

    Args:
        lr: The server's learning rate, eta.
        beta: Momentum of the class centres, in [0, 1).
        delta: Distance between two centres below which they repel each other.
        separation_weight: lambda: how strongly. A centre moves by at most this much per centre that is too near.
        separation_steps: Gradient steps of the separation, three in the description; 0 leaves it out. A step of length one
            forgets where it came from, so a pair that one push takes beyond delta comes back with the next: odd numbers end
            apart.
        sigma_floor: The smallest standard deviation of a prior.
        weighting: ``uniform`` is the description's mean; ``samples`` weighs networks by training samples, and a prior by
            samples of its class.
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
        require_positive("CMGA", lr=lr)
        if not 0 <= beta < 1:
            raise FlsuiteError(f"CMGA: beta must be in [0, 1), got {beta}")
        require_at_least(
            "CMGA",
            0,
            delta=delta,
            separation_weight=separation_weight,
            separation_steps=separation_steps,
        )
        require_at_least("CMGA", 0, sigma_floor=sigma_floor)
        self.lr = lr
        self.beta = beta
        self.delta = delta
        self.separation_weight = separation_weight
        self.separation_steps = separation_steps
        self.sigma_floor = sigma_floor

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        means, log_variances = self._entry(MEANS), self._entry(LOG_VARIANCES)
        networks, centres, spreads = RunningMean(), _HolderMean(), _HolderMean()
        for update in updates:
            weights, priors = select(update.state, (means, log_variances))
            networks.add(weights, update.samples if self.weighting == "samples" else 1.0)
            share = update.class_counts if self.weighting == "samples" else update.class_counts > 0
            centres.add(priors[means], share)
            spreads.add(priors[log_variances], share)

        new = move_weights(global_state, networks.mean(), self.layout.parameters, self.lr)
        momentum = self._momentum(centres, global_state[means])
        new[means] = separate(momentum, self.delta, self.separation_weight, self.separation_steps)
        spread = spreads.mean(otherwise=global_state[log_variances])
        new[log_variances] = floor_sigma(spread, self.sigma_floor)
        self.metrics["prior_sigma_floored"] = float((new[log_variances] > spread).sum())
        self._report(momentum, new[means], centres)
        return new

    def _momentum(self, centres: "_HolderMean", current: Tensor) -> Tensor:
        """Mechanism 3 on what the server remembers: the centres before separation, and which classes were ever seen."""
        never = {"centres": current, "seen": torch.zeros(len(current), dtype=torch.bool)}
        before = self.memory.get("momentum", never)
        momentum = class_momentum(
            before["centres"],
            before["seen"],
            centres.mean(before["centres"]),
            centres.held,
            self.beta,
        )
        self.memory["momentum"] = {"centres": momentum, "seen": before["seen"] | centres.held}
        return momentum

    def _report(self, momentum: Tensor, new: Tensor, centres: "_HolderMean") -> None:
        self.metrics["prior_distance_before"] = _smallest_distance(momentum)
        self.metrics["prior_distance_after"] = _smallest_distance(new)
        drift = (centres.mean(momentum) - momentum).norm(dim=1).tolist()
        for c in centres.held.nonzero().flatten().tolist():
            self.metrics[f"prior_drift/{c}"] = drift[c]

    def _entry(self, group: str) -> str:
        names = self.layout.groups.get(group, ())
        if len(names) != 1:
            raise FlsuiteError(
                f"CMGA aggregates class priors, and this model shares {len(names)} entries in the group {group!r}; "
                f"use a model with parameter_groups {MEANS} and {LOG_VARIANCES} of one tensor (classes, latent) each, "
                "such as ACVAE, or another aggregator"
            )
        return names[0]


def select(state: Mapping[str, Tensor], priors: tuple[str, ...]) -> tuple[State, State]:
    """Mechanism 1: what is shared, as networks and priors. Encoders are not here: they never left their client."""
    networks = {name: value for name, value in state.items() if name not in priors}
    return networks, {name: state[name] for name in priors}


def move_weights(
    theta: Mapping[str, Tensor], mean: State, parameters: tuple[str, ...], lr: float
) -> State:
    """Mechanism 2: ``theta + lr mean_k(theta_k - theta)`` for parameters; buffers take the mean as it is."""
    trained = set(parameters)
    return {
        name: torch.lerp(theta[name], value, lr) if name in trained else value
        for name, value in mean.items()
    }


def class_momentum(
    momentum: Tensor, seen: Tensor, observed: Tensor, held: Tensor, beta: float
) -> Tensor:
    """Mechanism 3: ``beta m + (1 - beta) observed`` for the classes that somebody holds; the others keep ``m``.

    A class that is held for the first time starts at what is observed: there is nothing yet to be slow about.

    Args:
        momentum: ``(classes, latent)``.
        seen: bool ``(classes,)``, held in an earlier round.
        observed: ``(classes, latent)``, mean centre over the holders; rows of classes nobody holds are not looked at.
        held: bool ``(classes,)``, held by a client of this round.
    """
    keep = torch.where(seen, beta, 0.0).to(momentum.dtype)[:, None]
    return torch.where(held[:, None], keep * momentum + (1 - keep) * observed, momentum)


def separate(centres: Tensor, delta: float, weight: float, steps: int) -> Tensor:
    """Mechanism 4: gradient steps of length one on every class's objective, all classes at once.

    ``1/2 ||mu_c - m_c||^2 + weight sum_{j != c} max(0, delta - ||mu_c - mu_j||)``, from ``mu = m``. The first term pulls
    back as hard as a neighbour pushes at distance ``weight``, so delta is encouraged, not enforced.

    Args:
        centres: ``m``, ``(classes, latent)``, finite.
    """
    moved = centres
    for _ in range(steps):
        towards, distance = _directions(moved)
        push = (towards * (distance < delta).unsqueeze(-1)).sum(1)
        moved = centres + weight * push  # mu - gradient, as the gradient is (mu - m) - weight push
    return moved.clone()


def floor_sigma(log_variance: Tensor, floor: float) -> Tensor:
    """Mechanism 5: no standard deviation below ``floor``."""
    return log_variance.clamp(min=2 * math.log(floor)) if floor > 0 else log_variance


def _directions(centres: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors ``(c, c, latent)`` from centre ``j`` to centre ``i``, and distances ``(c, c)``, infinite to itself.

    Two centres in one place have no direction: the pair is given an axis of its own, one end to each.
    """
    classes, latent = centres.shape
    gap = centres[:, None] - centres[None]
    distance = gap.norm(dim=-1)
    index = torch.arange(classes, device=centres.device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    axes = torch.nn.functional.one_hot((low * classes + high) % latent, latent).to(gap.dtype)
    sign = torch.where(index[:, None] < index, 1.0, -1.0).to(gap.dtype)
    direction = torch.where(
        distance[..., None] > 0, gap / distance[..., None].clamp(min=1e-30), axes * sign[..., None]
    )
    itself = torch.eye(classes, dtype=torch.bool, device=centres.device)
    return direction.masked_fill(itself[..., None], 0.0), distance.masked_fill(itself, math.inf)


def _smallest_distance(centres: Tensor) -> float:
    return float(torch.pdist(centres.float()).min()) if len(centres) > 1 else math.inf


class _HolderMean:
    """Mean of each class's row over the clients that hold the class, one update at a time, in float64."""

    def __init__(self) -> None:
        self.total: Tensor = torch.zeros(())
        self.weight: Tensor = torch.zeros(())

    def add(self, rows: Tensor, weight: Tensor) -> None:
        weight = weight.double()
        self.total = self.total + rows.double() * weight[:, None]
        self.weight = self.weight + weight

    @property
    def held(self) -> Tensor:
        return self.weight > 0

    def mean(self, otherwise: Tensor) -> Tensor:
        """``(classes, latent)``; rows that nobody holds are taken from ``otherwise``."""
        mean = self.total / self.weight.clamp(min=1e-30)[:, None]
        return torch.where(self.held[:, None], mean.to(otherwise.dtype), otherwise)
