"""FedDyn: Acar et al. 2021, algorithm 1.

Federated Learning Based on Dynamic Regularization, arXiv:2111.04263.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.part import Server
from flsuite.aggregators.rules.base import Weighting, withheld_by
from flsuite.aggregators.rules.mean import Mean
from flsuite.common.arguments import PositiveFloat, Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, Tree, clone


class FedDyn(Aggregator):
    """Each client's loss is corrected, so that its minimum becomes the federation's.

    Take it if few clients take part in a round, and their data differ.

    Client k minimizes ``F_k(w) - <g_k, w> + alpha / 2 ||w - w_t||^2`` (line 4), and then sets
    ``g_k <- g_k - alpha (w_k - w_t)``. The server sets ``h <- h - alpha / N sum_k (w_k - w_t)``
    with all N clients, and moves to ``mean(w_k) - h / alpha``. Both start at zero. The mean is not
    weighted by samples. It sends as many bytes as FedAvg.

    Many local steps need weight decay or ``trainer.gradient_clip_val`` to be stable.

    Args:
        alpha: Weight of the regularizer.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(self, alpha: PositiveFloat = 0.1, **kwargs: Any) -> None:
        self.alpha = alpha
        super().__init__(rule=DynamicMean(alpha=alpha), objective=Dynamic(alpha), **kwargs)


@dataclass(frozen=True)
class Dynamic(Objective, Settings):
    """The dynamic regularizer.

    Args:
        alpha: Its weight.
    """

    alpha: PositiveFloat = 0.1

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        w_t = {name: client.global_state[name] for name in client.layout.parameters}
        zeros = {name: torch.zeros_like(value) for name, value in w_t.items()}
        return w, {"w_t": w_t, "g_k": {**zeros, **client.memory.get("gradient", {})}}

    def gradient(self, oracle: Oracle, w: State, held: Tree, batch: Any) -> tuple[State, Tree]:
        g, w_t, g_k = oracle(w, batch), held["w_t"], held["g_k"]
        for k in g.keys() & w_t.keys():
            g[k] = g[k].add(w[k] - w_t[k], alpha=self.alpha) - g_k[k]  # line 4
        return g, held

    def end(self, client: ClientContext, w: State, held: Tree) -> None:
        w_t, g_k = held["w_t"], held["g_k"]
        renewed = {k: g - self.alpha * (w[k] - w_t[k]) for k, g in g_k.items()}
        client.memory["gradient"] = clone(renewed)


@dataclass(frozen=True)
class DynamicMean(Mean):
    """The plain mean of the clients' models, moved by the server's share of the regularizers.

    Args:
        alpha: Weight of the clients' regularizers.
    """

    weighting: Weighting = "uniform"
    alpha: PositiveFloat = 0.1

    needs = frozenset({"current models", "exact changes"})
    withholds = withheld_by()

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        mean = super().result(server, sums, updates)
        share = self.alpha * len(updates) / server.layout.clients
        h = server.memory.get("h", {})
        for name in server.layout.parameters:
            change = mean[name] - server.state[name]
            h[name] = h.get(name, torch.zeros_like(change)) - share * change
            mean[name] = mean[name] - h[name] / self.alpha
        server.memory["h"] = h
        return mean
