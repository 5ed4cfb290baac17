"""OTFusion: Singh and Jaggi 2020, algorithm 1 with the weight-based cost.

Model Fusion via Optimal Transport, arXiv:1910.05653.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import CohortRule, timed
from flsuite.aggregators.rules.matching import Places, assign, move, neurons, read_layer
from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import Layer, State, mean_of


@dataclass(frozen=True)
class OTFusion(CohortRule, Settings):
    """Averages the clients' models after aligning their neurons to a pivot.

    Take it to merge chains of layers that were trained from different starts.

    The mean is weighted by samples. The model must be a chain of Conv2d and Linear layers. At equal
    widths, the optimal transport plan between uniform masses is a permutation. The cost of matching
    two neurons is the squared distance of their incoming weights and biases. Outputs stay in place,
    because the order of the classes is known.

    From a common start, the best plan is close to the identity, and the result is close to FedAvg.
    All models of a round are in memory at the same time.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation;
    - ``pivot``: the client whose neuron order the others take;
    - ``moved/<layer>``: the fraction of the other clients' neurons that change position.

    Args:
        pivot: The client whose neuron order the others take. ``largest`` is the client of the
            round with the most samples, the first on a tie. A number is a client. If that client
            misses a round, the largest takes its place.
    """

    pivot: Literal["largest"] | NonNegativeInt = "largest"

    weighting = "samples"
    needs = frozenset({"each update", "current models", "a chain of Conv2d and Linear"})

    def combine(self, server: Server, updates: Iterator[ClientUpdate]) -> State:
        arrived, chain = list(updates), server.layout.chain
        with timed(server):
            pivot, plans = self._pivot(arrived), list[Mapping[str, Places]]()

            def aligned() -> Iterator[tuple[State, float]]:
                for update in arrived:
                    places = transport_plan(update.state, pivot.state, chain)
                    if update is not pivot:
                        plans.append(places)
                    yield align(update.state, places, chain), update.samples

            new = mean_of(aligned())
            for layer in chain[:-1]:
                moved = [_moved(places[layer.name]) for places in plans]
                server.metrics[f"moved/{layer.name}"] = sum(moved) / len(moved) if moved else 0.0
            server.metrics["pivot"] = float(pivot.client)
        return new

    def _pivot(self, updates: Sequence[ClientUpdate]) -> ClientUpdate:
        named = (update for update in updates if update.client == self.pivot)
        # max returns the first on a tie.
        return next(named, None) or max(updates, key=lambda update: update.samples)

    def prepare(self, server: Server) -> None:
        """Refuse a pivot that does not exist."""
        if self.pivot != "largest" and self.pivot >= server.layout.clients:
            raise FlsuiteError(
                f"OTFusion: pivot must be below the number of clients, {server.layout.clients}, "
                f"got {self.pivot}"
            )


def transport_plan(state: State, pivot: State, chain: Sequence[Layer]) -> dict[str, Places]:
    """Return the new positions of the neurons of each hidden layer, by layer name.

    Layers are processed from the input on: the incoming weights follow the previous layer's
    neurons, and then each neuron moves to the position of a similar neuron of the pivot, one to
    one.
    """
    places: dict[str, Places] = {}
    inputs: Places | None = None
    for layer in chain[:-1]:
        rows = neurons(*read_layer(state, layer, inputs))
        targets = neurons(*read_layer(pivot, layer, None))

        # A squared distance is two squared norms minus twice this product. The norms sum to the
        # same total for every permutation.
        inputs = places[layer.name] = assign(rows @ targets.T)
    return places


def align(state: State, plan: Mapping[str, Places], chain: Sequence[Layer]) -> State:
    """Return the model with the neurons of each hidden layer at their new positions.

    It computes the same function.
    """
    aligned = dict(state)
    inputs: Places | None = None
    for layer in chain:
        weight, bias = read_layer(state, layer, inputs)
        # The last layer has no plan: its neurons are the classes.
        inputs = plan.get(layer.name)
        aligned[layer.weight_name] = weight if inputs is None else move(weight, inputs)
        if bias is not None:
            aligned[layer.bias_name] = bias if inputs is None else move(bias, inputs)
    return aligned


def _moved(places: Places) -> float:
    """Return the fraction of neurons that change position."""
    return float((places.at != torch.arange(places.size)).double().mean())
