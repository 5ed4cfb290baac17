"""PFNM: Yurochkin et al. 2019, applied to a network layer by layer.

Bayesian Nonparametric Federated Learning of Neural Networks, arXiv:1905.12022: the matching of one
layer, section 3.1. Wang et al. 2020, Federated Learning with Matched Averaging, arXiv:2002.06440:
matching the layers of a convolutional network, from the input to the output.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import CohortRule, timed
from flsuite.aggregators.rules.matching import Places, assign, neurons, read_layer
from flsuite.common.arguments import NonNegativeInt, PositiveFloat, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import numpy_generator
from flsuite.common.state import Layer, State


@dataclass(frozen=True)
class PFNM(CohortRule, Settings):
    """Matches the clients' neurons to global neurons, and takes each one's posterior mean.

    Take it to merge small chains of layers whose neurons have no common order.

    The model must be a chain of Conv2d and Linear layers. The incoming weights and the bias of a
    client's neuron are a draw around those of a global neuron. The number of global neurons is not
    fixed. An output is the mean over clients weighted by their samples of its class.

    The prior shrinks every hidden layer toward zero: M equal clients give M / (M + 1) of their
    weights with the default variances. Biases of the output layer are not shrunk, so the
    predictions of a network with biases can change.

    Without ``grow``, the widths stay fixed, and each client's neurons are matched to all global
    neurons. With ``grow``, the federation's model is the same. In addition, a network is rebuilt
    with as many neurons per layer as the clients have different ones. It is the artifact
    ``expanded_model``. Small neurons become new ones even if all clients agree.

    All models of a round are in memory at the same time.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation;
    - ``width/<layer>``: neurons of each hidden layer of the expanded network;
    - ``expanded_model_accuracy``: its accuracy on the server's own samples, if there are any.

    Args:
        sigma: Standard deviation of a client's weights around the global neuron's weights.
        sigma0: Standard deviation of the global weights around zero.
        gamma: Mass of the beta process. A larger mass gives more global neurons.
        sweeps: How often each client is matched again, in random order.
        grow: Whether to rebuild the network with more neurons. It requires a run of one round.
    """

    sigma: PositiveFloat = 1.0
    sigma0: PositiveFloat = 1.0
    gamma: PositiveFloat = 7.0
    sweeps: NonNegativeInt = 5
    grow: bool = False

    needs = frozenset({"each update", "current models", "a chain of Conv2d and Linear"})

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        arrived = list(updates)
        with timed(server):
            new = self._fuse(server, arrived, grow=False)
            if self.grow:
                wide = self._fuse(server, arrived, grow=True)
                server.artifacts["expanded_model"] = _expand(server, new, wide)
        return new

    def _fuse(self, server: Server, updates: Sequence[ClientUpdate], grow: bool) -> State:
        prior = _Prior(self.sigma**-2, self.sigma0**-2, self.gamma)
        generator = numpy_generator(server.tools.seed, "pfnm", updates[0].round)
        return fuse(updates, server.layout.chain, prior, self.sweeps, grow, generator)

    def prepare(self, server: Server) -> None:
        """Refuse ``grow`` in a run of several rounds, and without the network."""
        if not self.grow:
            return
        if (rounds := server.tools.rounds) != 1:
            raise FlsuiteError(
                "PFNM: grow rebuilds the network with other widths, which no further round can "
                f"train; set trainer.rounds to 1, got {'null' if rounds is None else rounds}"
            )
        if server.tools.module is None:
            raise server.tools.refusal("PFNM", "module", "rebuilds the network with grow")


def _expand(server: Server, state: State, wide: State) -> nn.Module:
    """Return the expanded network, and log its size and its score."""
    assert server.tools.module is not None  # prepare has refused
    expanded = expanded_module(server.tools.module(state), server.layout.chain, wide)

    for layer in server.layout.chain[:-1]:
        server.metrics[f"width/{layer.name}"] = float(len(wide[layer.weight_name]))
    if server.tools.score_module is not None:
        server.metrics["expanded_model_accuracy"] = server.tools.score_module(expanded)
    return expanded


def fuse(
    updates: Sequence[ClientUpdate],
    chain: Sequence[Layer],
    prior: "_Prior",
    sweeps: int,
    grow: bool,
    generator: np.random.Generator,
) -> State:
    """Return the global network, with the widths that the matching yields.

    Layers are processed from the input on: the incoming weights of each client follow its neurons
    of the previous layer to their global positions, and are 0 for global neurons that it lacks.
    """
    fused: State = {}
    inputs: list[Places | None] = [None] * len(updates)
    for layer in chain:
        read = [read_layer(u.state, layer, p) for u, p in zip(updates, inputs, strict=True)]
        rows = [neurons(weight, bias) for weight, bias in read]
        if layer is chain[-1]:
            mean = class_weighted_mean(rows, [update.class_counts for update in updates])
        else:
            places = match_neurons(rows, prior, sweeps, grow, generator)
            mean = posterior_mean(rows, places, prior)
            inputs = list(places)

        weight, bias = read[0]
        columns = weight[0].numel()
        fused[layer.weight_name] = mean[:, :columns].unflatten(1, weight.shape[1:]).to(weight.dtype)
        if bias is not None:
            fused[layer.bias_name] = mean[:, columns].to(bias.dtype)
    return fused


def class_weighted_mean(rows: Sequence[Tensor], class_counts: Sequence[Tensor]) -> Tensor:
    """Return the mean of each output over clients, weighted by their samples of its class.

    A class that no client has takes the plain mean.

    Args:
        rows: Incoming weights per client, float64 ``(classes, inputs)``.
        class_counts: Samples per client, ``(classes,)``.
    """
    counts = torch.stack([count.double() for count in class_counts])
    if counts.shape[1] != len(rows[0]):
        raise FlsuiteError(
            "PFNM weights each output by the clients' samples of its class, but the model has "
            f"{len(rows[0])} outputs for {counts.shape[1]} classes; choose a model with one output "
            "per class"
        )
    counts[:, counts.sum(0) == 0] = 1.0
    total = sum(count[:, None] * row for count, row in zip(counts, rows, strict=True))
    return total / counts.sum(0)[:, None]


def expanded_module(module: nn.Module, chain: Sequence[Layer], weights: State) -> nn.Module:
    """Return a copy of a network whose layers have these weights, of any widths.

    Args:
        module: The network. Its modules have the names of the layers.
        chain: Its layers.
        weights: Their new weights and biases.
    """
    expanded = copy.deepcopy(module)
    for layer in chain:
        part: Any = expanded.get_submodule(layer.name)
        weight, device = weights[layer.weight_name], next(part.parameters()).device
        if layer.kind == "conv2d":
            part.out_channels, part.in_channels = weight.shape[:2]
        else:
            part.out_features, part.in_features = weight.shape

        part.weight = nn.Parameter(weight.to(device, copy=True))
        if layer.bias:
            part.bias = nn.Parameter(weights[layer.bias_name].to(device, copy=True))
    return expanded


_LARGEST_POPULARITY = 10
"""Members up to which a global neuron becomes more attractive."""


class _Prior(NamedTuple):
    """The beta process of a layer: section 3.1.

    A client's neuron v has the incoming weights ``v ~ N(theta_k, 1 / s)`` of a global neuron k, and
    ``theta_k ~ N(0, 1 / s0)``. For a global neuron with m members, we keep ``g = s sum of their
    rows`` and ``q = s0 + m s``. Its posterior mean is ``g / q``.

    Attributes:
        precision: s, of a client's weights around the global neuron's.
        global_precision: s0, of the global weights around zero.
        gamma: Mass of the beta process.
    """

    precision: float
    global_precision: float
    gamma: float


def match_neurons(
    rows: Sequence[Tensor], prior: _Prior, sweeps: int, grow: bool, generator: np.random.Generator
) -> list[Places]:
    """Return the global neuron of each client's neurons.

    The first client's neurons are the first global neurons. The other clients follow in order, and
    then each client is removed and matched again, in a new random order per sweep.

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

    # With a single client, there is nothing to match.
    for _ in range(sweeps if clients > 1 else 0):
        for client in generator.permutation(clients).tolist():
            matched.remove(client)
            matched.add(client, matched.best(client, grow))
    return [Places(matched.at[client], len(matched.members)) for client in range(clients)]


def posterior_mean(rows: Sequence[Tensor], places: Sequence[Places], prior: _Prior) -> Tensor:
    """Return the mean of each global neuron given its members, ``(places, inputs)``."""
    sums = rows[0].new_zeros(places[0].size, rows[0].shape[1])
    members = rows[0].new_zeros(places[0].size)
    for own, place in zip(rows, places, strict=True):
        sums.index_add_(0, place.at, own, alpha=prior.precision)
        members[place.at] += 1
    return sums / (prior.global_precision + prior.precision * members)[:, None]


def gains_of_members(
    rows: Tensor, sums: Tensor, members: Tensor, clients: int, prior: _Prior
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
    # Expand the square, to avoid a tensor of size rows x places x inputs.
    joined = own[:, None] + 2 * s * (rows @ sums.T) + others
    popularity = members.clamp(max=_LARGEST_POPULARITY)
    return joined / (q + s) - others / q + torch.log(popularity / (clients - popularity))


def gains_of_new_neurons(rows: Tensor, clients: int, prior: _Prior) -> Tensor:
    """Return the gain of a row that becomes the t-th new global neuron, ``(rows, rows)``.

    It is ``|s v|^2 / (s0 + s) + 2 log(gamma / M) - 2 log t``.
    """
    s, s0 = prior.precision, prior.global_precision
    alone = s**2 * rows.square().sum(1) / (s0 + s)
    number = torch.arange(1, len(rows) + 1, dtype=rows.dtype)
    return alone[:, None] + 2 * torch.log(prior.gamma / (clients * number))


class _Matching:
    """The matching so far: g, m, and the global neurons of each client, by its number."""

    def __init__(self, rows: Sequence[Tensor], prior: _Prior) -> None:
        self.rows = rows
        self.prior = prior
        self.sums = rows[0].new_zeros(0, rows[0].shape[1])
        self.members = rows[0].new_zeros(0)
        self.at: dict[int, Tensor] = {}

    def best(self, client: int, grow: bool) -> Tensor:
        """Return the best global neurons for an unmatched client."""
        rows, clients = self.rows[client], len(self.rows)
        gains = gains_of_members(rows, self.sums, self.members, clients, self.prior)
        if grow:
            gains = torch.cat([gains, gains_of_new_neurons(rows, clients, self.prior)], dim=1)
        return assign(gains).at

    def add(self, client: int, at: Tensor) -> None:
        """Match a client. Numbers above the last global neuron become new ones."""
        # The first new neurons gain the most, so no number is skipped.
        new = max(0, int(at.max()) + 1 - len(self.members))
        self.sums = F.pad(self.sums, (0, 0, 0, new))
        self.members = F.pad(self.members, (0, new))

        self.at[client] = at
        self.sums.index_add_(0, at, self.rows[client], alpha=self.prior.precision)
        self.members[at] += 1

    def remove(self, client: int) -> None:
        """Remove a client, and drop global neurons that only it had."""
        at = self.at.pop(client)
        self.sums.index_add_(0, at, self.rows[client], alpha=-self.prior.precision)
        self.members[at] -= 1

        kept = self.members > 0
        numbers = kept.cumsum(0) - 1
        self.sums, self.members = self.sums[kept], self.members[kept]
        self.at = {other: numbers[own] for other, own in self.at.items()}
