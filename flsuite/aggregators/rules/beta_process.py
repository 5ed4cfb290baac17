"""The matching of one layer under a beta process: Yurochkin et al. 2019, section 3.1.

A client's neuron v has the incoming weights ``v ~ N(theta_k, 1 / s)`` of a global neuron k, and
``theta_k ~ N(0, 1 / s0)``. Of a global neuron with m members we keep ``g = s sum of their rows``
and ``q = s0 + m s``. Its posterior mean is ``g / q``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flsuite.aggregators.rules.matching import Places, assign

__all__ = [
    "Prior",
    "gains_of_members",
    "gains_of_new_neurons",
    "match_neurons",
    "posterior_mean",
]

LARGEST_POPULARITY = 10
"""Members up to which a global neuron becomes more attractive."""


class Prior(NamedTuple):
    """The prior of a layer.

    Attributes:
        precision: s, of a client's weights around those of the global neuron.
        global_precision: s0, of the global weights around zero.
        gamma: Mass of the beta process.
    """

    precision: float
    global_precision: float
    gamma: float


def match_neurons(
    rows: Sequence[Tensor], prior: Prior, sweeps: int, grow: bool, generator: np.random.Generator
) -> list[Places]:
    """Return the global neuron of each client's neurons.

    The first client's neurons are the first global ones. The other clients follow in their order,
    and then each client is taken out and matched again, in a new random order per sweep.

    Args:
        rows: Incoming weights per client, float64 ``(neurons, inputs)``, of the same width.
        prior: The prior.
        sweeps: Number of sweeps.
        grow: Whether a neuron can become a new global one.
        generator: Draws the orders.
    """
    clients = len(rows)
    matched = _Matching(rows, prior)
    matched.add(0, torch.arange(len(rows[0])))
    for client in range(1, clients):
        matched.add(client, matched.best(client, grow))

    # A client alone has nobody to be matched to.
    for _ in range(sweeps if clients > 1 else 0):
        for client in generator.permutation(clients).tolist():
            matched.remove(client)
            matched.add(client, matched.best(client, grow))
    return [Places(matched.at[client], len(matched.members)) for client in range(clients)]


def posterior_mean(rows: Sequence[Tensor], places: Sequence[Places], prior: Prior) -> Tensor:
    """Return the mean of each global neuron given its members, ``(places, inputs)``."""
    sums = rows[0].new_zeros(places[0].size, rows[0].shape[1])
    members = rows[0].new_zeros(places[0].size)
    for own, place in zip(rows, places, strict=True):
        sums.index_add_(0, place.at, own, alpha=prior.precision)
        members[place.at] += 1
    return sums / (prior.global_precision + prior.precision * members)[:, None]


def gains_of_members(
    rows: Tensor, sums: Tensor, members: Tensor, clients: int, prior: Prior
) -> Tensor:
    """Return the log posterior gained if a row joins a global neuron, ``(rows, places)``.

    It is ``|s v + g|^2 / (q + s) - |g|^2 / q + log(m / (M - m))``.

    Args:
        rows: The rows v of a client.
        sums: g, ``(places, inputs)``.
        members: m, float64 ``(places,)``, at least 1 and below ``clients``.
        clients: M.
        prior: The prior.
    """
    s, q = prior.precision, prior.global_precision + prior.precision * members
    own, others = s**2 * rows.square().sum(1), sums.square().sum(1)
    # The square is expanded: nothing of size rows x places x inputs is formed.
    joined = own[:, None] + 2 * s * (rows @ sums.T) + others
    popularity = members.clamp(max=LARGEST_POPULARITY)
    return joined / (q + s) - others / q + torch.log(popularity / (clients - popularity))


def gains_of_new_neurons(rows: Tensor, clients: int, prior: Prior) -> Tensor:
    """Return the gain of a row that becomes the t-th new global neuron, ``(rows, rows)``.

    It is ``|s v|^2 / (s0 + s) + 2 log(gamma / M) - 2 log t``.
    """
    s, s0 = prior.precision, prior.global_precision
    alone = s**2 * rows.square().sum(1) / (s0 + s)
    number = torch.arange(1, len(rows) + 1, dtype=rows.dtype)
    return alone[:, None] + 2 * torch.log(prior.gamma / (clients * number))


class _Matching:
    """The clients matched so far: g, m, and the global neurons of each client by its number."""

    def __init__(self, rows: Sequence[Tensor], prior: Prior) -> None:
        self.rows = rows
        self.prior = prior
        self.sums = rows[0].new_zeros(0, rows[0].shape[1])
        self.members = rows[0].new_zeros(0)
        self.at: dict[int, Tensor] = {}

    def best(self, client: int, grow: bool) -> Tensor:
        """Return the best global neurons for a client that is not matched."""
        rows, clients = self.rows[client], len(self.rows)
        gains = gains_of_members(rows, self.sums, self.members, clients, self.prior)
        if grow:
            gains = torch.cat([gains, gains_of_new_neurons(rows, clients, self.prior)], dim=1)
        return assign(gains).at

    def add(self, client: int, at: Tensor) -> None:
        """Match a client. Numbers above the last global neuron become new ones."""
        # The first new neurons gain the most, so that no number is left out.
        new = max(0, int(at.max()) + 1 - len(self.members))
        self.sums = F.pad(self.sums, (0, 0, 0, new))
        self.members = F.pad(self.members, (0, new))

        self.at[client] = at
        self.sums.index_add_(0, at, self.rows[client], alpha=self.prior.precision)
        self.members[at] += 1

    def remove(self, client: int) -> None:
        """Take a client out, and drop global neurons that were its alone."""
        at = self.at.pop(client)
        self.sums.index_add_(0, at, self.rows[client], alpha=-self.prior.precision)
        self.members[at] -= 1

        kept = self.members > 0
        numbers = kept.cumsum(0) - 1
        self.sums, self.members = self.sums[kept], self.members[kept]
        self.at = {other: numbers[own] for other, own in self.at.items()}
