"""OTFusion: Singh and Jaggi 2020, algorithm 1 with the weight-based cost.

Model Fusion via Optimal Transport, arXiv:1910.05653.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.matching import (
    Places,
    assign,
    move,
    neurons,
    read_layer,
    require_chain,
)
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientUpdate
from flsuite.state import Layer, RunningMean, State, StateLayout

__all__ = ["OTFusion", "align", "transport_plan"]


class OTFusion(Aggregator):
    """The mean by samples of the clients' models after their neurons are aligned to a pivot.

    It needs a chain of Conv2d and Linear layers. At equal widths the optimal transport plan between
    uniform masses is a permutation. Two neurons cost the squared distance of their incoming weights
    and biases. Outputs stay in place, because the order of the classes is known.

    From one common start the best plan is mostly the identity, and the result is close to FedAvg.
    All models of a round are in memory at a time.

    Logged as ``train/<name>``:

    - ``server_seconds``: the time of the aggregation;
    - ``pivot``: the client whose order the others take;
    - ``moved/<layer>``: the share of the other clients' neurons that change their place.

    Args:
        pivot: The client whose order of neurons the others take. ``largest`` is the client with the
            most samples of the round, the first of equals. A number is a client. The largest takes
            its place in a round that it misses.
    """

    def __init__(self, pivot: Literal["largest"] | int = "largest") -> None:
        self.pivot = pivot
        if pivot != "largest" and (type(pivot) is not int or pivot < 0):
            raise FlsuiteError(
                f"OTFusion: pivot must be 'largest' or a client's number, got {pivot!r}"
            )

    def configure(self, layout: StateLayout) -> None:
        """Prepare for a model, and refuse one that is no chain."""
        super().configure(layout)
        require_chain("OTFusion", layout)
        if isinstance(self.pivot, int) and self.pivot >= layout.clients:
            raise FlsuiteError(
                f"OTFusion: pivot must be below the number of clients, {layout.clients}, "
                f"got {self.pivot}"
            )

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        arrived, started = list(updates), time.perf_counter()
        pivot = self._pivot(arrived)

        mean, plans = RunningMean(), []
        for update in arrived:
            places = transport_plan(update.state, pivot.state, self.layout.chain)
            mean.add(align(update.state, places, self.layout.chain), update.samples)
            if update is not pivot:
                plans.append(places)

        new = mean.mean()
        self._report(plans)
        self.metrics["pivot"] = float(pivot.client)
        self.metrics["server_seconds"] = time.perf_counter() - started
        return new

    def _pivot(self, updates: Sequence[ClientUpdate]) -> ClientUpdate:
        named = (update for update in updates if update.client == self.pivot)
        # max returns the first of equals.
        return next(named, None) or max(updates, key=lambda update: update.samples)

    def _report(self, plans: Sequence[Mapping[str, Places]]) -> None:
        for layer in self.layout.chain[:-1]:
            moved = [
                float((places.at != torch.arange(places.size)).double().mean())
                for places in (match[layer.name] for match in plans)
            ]
            self.metrics[f"moved/{layer.name}"] = sum(moved) / len(moved) if moved else 0.0


def transport_plan(state: State, pivot: State, chain: Sequence[Layer]) -> dict[str, Places]:
    """Return where the neurons of each hidden layer go, by the layer's name.

    Layer by layer from the input on: the incoming weights follow the neurons of the layer before,
    and then each neuron goes to the place of a neuron of the pivot near to it, one to one.
    """
    places: dict[str, Places] = {}
    inputs: Places | None = None
    for layer in chain[:-1]:
        rows = neurons(*read_layer(state, layer, inputs))
        targets = neurons(*read_layer(pivot, layer, None))

        # A squared distance is two squared norms less twice this product. Every permutation has the
        # same norms in all.
        inputs = places[layer.name] = assign(rows @ targets.T)
    return places


def align(state: State, plan: Mapping[str, Places], chain: Sequence[Layer]) -> State:
    """Return the model with the neurons of each hidden layer at their places.

    It is the same function.
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
