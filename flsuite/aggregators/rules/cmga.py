"""CMGA, Constrained Momentum Gaussian Aggregation, of networks and class priors.

Source: the description of CMGA for the federated adaptive conditional VAE (F-ACVAE), mechanisms 1
to 5. Each mechanism is one function here, in that order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import LinearRule, Weighting
from flsuite.aggregators.rules.mean import quotient
from flsuite.common.arguments import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Settings,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, divided, scaled

MEANS, LOG_VARIANCES = "prior_mean", "prior_log_variance"
"""The parameter groups that a model declares, one tensor ``(classes, latent)`` each."""


@dataclass(frozen=True)
class CMGA(LinearRule, Settings):
    """Averages the network changes, and updates each class prior with momentum over its holders.

    Take it with ``ACVAE``, whose class priors it aggregates.

    The model declares its priors as the groups ``prior_mean`` and ``prior_log_variance``, and keeps
    its encoder private. A client holds a class if its class count is above zero. Class counts enter
    only sums over clients. The log variance of a class is also averaged over its holders: a client
    without samples of a class has learned nothing about it.

    The momentum of a class starts at the first observed centre. The description mixes every
    observation in, but does not say where the momentum starts.

    A late client has learned its priors in the latent space of an older model. They do not apply to
    the latent space of the current model, so CMGA needs current models.

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
            amount per centre that is too near.
        separation_steps: Gradient steps of the separation. The description uses 3. 0 turns it off.
            One step separates an isolated pair fully, up to delta. More steps settle centres with
            several neighbors.
        sigma_floor: Smallest standard deviation of a prior.
        weighting: ``uniform`` is the description's mean. ``samples`` weights networks by training
            samples, and a class's prior by the samples of the class.
    """

    lr: PositiveFloat = 1.0
    beta: BelowOne = 0.9
    delta: NonNegativeFloat = 2.0
    separation_weight: NonNegativeFloat = 0.1
    separation_steps: NonNegativeInt = 3
    sigma_floor: NonNegativeFloat = 0.1
    weighting: Weighting = "uniform"

    needs = frozenset({"current models"})

    # The client half

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        means, log_variances = _priors(layout)
        networks, priors = select(update.state, (means, log_variances))
        counts = update.class_counts
        # A client contributes to a class's prior only if it holds the class.
        share = (counts if self.weighting == "samples" else counts > 0).double()
        return {
            **scaled({"weight": 1.0, "networks": networks}, self.weight(update)),
            "holders": share,
            "centres": priors[means].double() * share[:, None],
            "spreads": priors[log_variances].double() * share[:, None],
        }

    # The server half

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        theta, (means, log_variances) = server.state, _priors(server.layout)
        networks = divided(sums["networks"], sums["weight"])

        # The order matters: the memory keeps the centres before separation.
        new = move_weights(theta, networks, server.layout.parameters, self.lr)
        momentum = self._momentum(server, sums, theta[means])
        new[means] = separate(momentum, self.delta, self.separation_weight, self.separation_steps)
        spread = _holder_mean(sums["spreads"], sums["holders"], otherwise=theta[log_variances])
        new[log_variances] = floor_sigma(spread, self.sigma_floor)

        server.metrics["prior_distance_before"] = _smallest_distance(momentum)
        server.metrics["prior_distance_after"] = _smallest_distance(new[means])
        server.metrics["prior_sigma_floored"] = float((new[log_variances] > spread).sum())
        return new

    def _momentum(self, server: Server, sums: Tree, current: Tensor) -> Tensor:
        """Apply mechanism 3 to the memory of unseparated centres and the classes seen so far."""
        never = {"centres": current, "seen": torch.zeros(len(current), dtype=torch.bool)}
        before, is_held = server.memory or never, sums["holders"] > 0
        # A class that no client of the round holds has no observation. Its row is ignored below.
        observed = _holder_mean(sums["centres"], sums["holders"], otherwise=before["centres"])
        momentum = class_momentum(before["centres"], before["seen"], observed, is_held, self.beta)
        server.memory.update(centres=momentum, seen=before["seen"] | is_held)

        # Only for held classes: the drift of the others is 0 by construction.
        drift = (observed - momentum).norm(dim=1).tolist()
        for c in is_held.nonzero().flatten().tolist():
            server.metrics[f"prior_drift/{c}"] = drift[c]
        return momentum

    # Before the first round

    def prepare(self, server: Server) -> None:
        """Refuse a model without class priors."""
        _priors(server.layout)


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
    # The rate applies to parameters only: a running statistic is not a gradient step.
    trained = set(parameters)
    return {
        name: torch.lerp(theta[name].to(value.dtype), value, lr) if name in trained else value
        for name, value in mean.items()
    }


def class_momentum(
    momentum: Tensor, seen: Tensor, observed: Tensor, held: Tensor, beta: float
) -> Tensor:
    """Return ``beta m + (1 - beta) observed`` for held classes (mechanism 3).

    The other classes keep ``m``. A class that is held for the first time starts at its observed
    centre, because it has no history.

    Args:
        momentum: ``m``, ``(classes, latent)``.
        seen: Classes held in an earlier round, bool ``(classes,)``.
        observed: Mean centres over the holders, ``(classes, latent)``. Rows of other classes are
            ignored.
        held: Classes held by a client of this round, bool ``(classes,)``.
        beta: In [0, 1).
    """
    # No momentum for a class without history.
    keep = torch.where(seen, beta, 0.0).to(momentum.dtype)[:, None]
    return torch.where(held[:, None], keep * momentum + (1 - keep) * observed, momentum)


def separate(centres: Tensor, delta: float, weight: float, steps: int) -> Tensor:
    """Push apart centres that are nearer than delta, all classes at once (mechanism 4).

    The objective of a class is
    ``1/2 ||mu_c - m_c||^2 + weight sum_{j != c} max(0, delta - ||mu_c - mu_j||)``, starting at
    ``mu = m``. At distance ``weight``, the first term balances the push of one neighbor, so delta
    is encouraged, not enforced. A step is a unit gradient step that stops at delta: at the kink of
    the hinge, its slope is the fraction of ``weight`` that keeps the pair there.

    Args:
        centres: ``m``, ``(classes, latent)``, finite.
        delta: Distance below which two centres repel each other.
        weight: lambda.
        steps: Number of gradient steps.
    """
    if weight == 0:
        return centres.clone()

    # The fraction in [0, 1] that brings both centres of an isolated pair to delta.
    towards, distance = directions(centres)
    share = ((delta - distance) / (2 * weight)).clamp(0, 1)
    moved = centres
    for _ in range(steps):
        # mu - gradient, where the gradient is (mu - m) - weight push: mu cancels.
        moved = centres + weight * (towards * share.unsqueeze(-1)).sum(1)

        # Neighbors push a pair too: the more there are, the smaller its own correction.
        towards, distance = directions(moved)
        pushing = ((distance < delta) | (share > 0)).sum(1)
        both = (pushing[:, None] + pushing).clamp(min=1)
        share = (share + (delta - distance) / (both * weight)).clamp(0, 1)
    return moved.clone()


def floor_sigma(log_variance: Tensor, floor: float) -> Tensor:
    """Raise standard deviations below ``floor`` to it (mechanism 5)."""
    # log sigma^2 = 2 log sigma. A floor of 0 has no logarithm.
    return log_variance.clamp(min=2 * math.log(floor)) if floor > 0 else log_variance


def _priors(layout: StateLayout) -> tuple[str, str]:
    """Return the names of the entries with the means and the log variances.

    Raises:
        FlsuiteError: If the model does not share one entry of each.
    """
    for group in (MEANS, LOG_VARIANCES):
        names = layout.groups.get(group, ())
        if len(names) != 1:
            raise FlsuiteError(
                f"CMGA aggregates class priors, but this model shares {len(names)} entries in the "
                f"group {group!r}; use a model with parameter_groups {MEANS} and {LOG_VARIANCES} "
                "of one tensor (classes, latent) each, such as ACVAE, or another aggregator"
            )
    return layout.groups[MEANS][0], layout.groups[LOG_VARIANCES][0]


def _holder_mean(total: Tensor, weight: Tensor, otherwise: Tensor) -> Tensor:
    """Return the mean of each class's row over the clients that hold the class.

    Args:
        total: The weighted sum of the clients' rows, float64 ``(classes, latent)``.
        weight: The sum of the clients' weights per class, float64 ``(classes,)``.
        otherwise: Rows for classes that no client holds. It sets the dtype.
    """
    return quotient(total, weight[:, None], otherwise=otherwise).to(otherwise.dtype)


def directions(centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit vectors from each centre j to each centre i, and their distances.

    Args:
        centres: ``(classes, latent)``.

    Returns:
        Directions ``(i, j, latent)``, zero from a centre to itself, and distances ``(i, j)``,
        infinite to itself.
    """
    classes, latent = centres.shape
    gap = centres[:, None] - centres[None]
    distance = gap.norm(dim=-1)
    itself = torch.eye(classes, dtype=torch.bool, device=centres.device)

    # Coinciding centres have no direction, so each pair gets an axis, with opposite signs at its
    # ends.
    index = torch.arange(classes, device=centres.device)
    low, high = torch.minimum(index[:, None], index), torch.maximum(index[:, None], index)
    axes = torch.nn.functional.one_hot((low * classes + high) % latent, latent).to(gap.dtype)
    sign = torch.where(index[:, None] < index, 1.0, -1.0).to(gap.dtype)

    unit = gap / distance[..., None].clamp(min=1e-30)
    direction = torch.where(distance[..., None] > 0, unit, axes * sign[..., None])
    return direction.masked_fill(itself[..., None], 0.0), distance.masked_fill(itself, math.inf)


def _smallest_distance(centres: Tensor) -> float:
    """Return the smallest distance between two centres, infinite for a single centre."""
    return float(torch.pdist(centres.float()).min()) if len(centres) > 1 else math.inf
