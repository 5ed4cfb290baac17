"""IFCA: Ghosh et al. 2020, algorithm 1, with averaged models.

An Efficient Framework for Clustered Federated Learning, arXiv:2006.04088.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.base import LinearRule, withheld_by
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.client import ClientContext
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.random import torch_generator
from flsuite.common.state import State, StateLayout, Tree, cast, divided, scaled, shuffled


class IFCA(Aggregator):
    """One model per cluster of clients. Each client chooses the one with the lowest loss.

    Take it if clients fall into a few groups with different tasks.

    A client receives all models, trains the one with the lowest loss on its samples (line 6), and
    the server averages the models of each cluster by samples. A client receives ``clusters``
    models, and sends one.

    A client is scored by the model that it chose last. The first model is also the global one: it
    is scored as such, exported, and the model of clients that never took part. It has the initial
    weights. The others have them in another order within each tensor, which differs with the seed
    of the run.

    Args:
        clusters: Number of models.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(self, clusters: PositiveInt = 2, **kwargs: Any) -> None:
        self.clusters = clusters
        if kwargs.get("server_optimizer") is not None:
            raise FlsuiteError(
                "IFCA: a server_optimizer would step the first of the models alone; leave it out"
            )
        super().__init__(rule=ClusterMeans(clusters), objective=ClusterModel(), **kwargs)


@dataclass(frozen=True)
class ClusterMeans(LinearRule, Settings):
    """The mean model of each cluster.

    Args:
        clusters: Number of models. The first one is the global model, the others are in memory.
    """

    clusters: PositiveInt = 2

    weighting = "samples"
    needs = frozenset({"current models"})
    withholds = {
        **withheld_by("its cluster"),
        "dense changes": "sends one of several models, which did not start from the global one",
    }

    def broadcast(self, server: Server) -> dict[str, Any]:
        return {"models": _others(server, self.clusters)}

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        models: dict[str, State] = {"0": client.global_state, **client.received["models"]}
        losses = [client.fit.mean_loss(model) for model in models.values()]
        chosen = min(range(len(losses)), key=losses.__getitem__)  # line 6

        client.memory["cluster"] = chosen
        client.metrics["cluster"] = float(chosen)
        client.extras["cluster"] = torch.eye(len(models))[chosen]
        reset = {name: w[name] for name in client.layout.reset}
        return {**w, **models[str(chosen)], **reset}, {}

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return {"cluster": Statistic(torch.zeros(self.clusters))}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        chosen = (self.weight(update) * update.extras["cluster"].double()).tolist()
        models = {str(c): _weighted(update.state, weight) for c, weight in enumerate(chosen)}
        return {"weights": {str(c): weight for c, weight in enumerate(chosen)}, "models": models}

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        old = {"0": server.state, **_others(server, self.clusters)}
        new = {
            c: cast(divided(sums["models"][c], weight), server.state) if weight > 0 else old[c]
            for c, weight in sums["weights"].items()
        }
        server.memory["models"] = {c: model for c, model in new.items() if c != "0"}
        return new["0"]


def _weighted(state: State, weight: float) -> Mapping[str, Tensor]:
    """Return a state times a weight. With weight 0, counters are 0: sums keep their maximum."""
    own = scaled(state, weight)
    return own if weight else {name: torch.zeros_like(value) for name, value in own.items()}


def _others(server: Server, clusters: int) -> dict[str, State]:
    """Return all models but the first. At first, they are shuffled copies of it."""
    if kept := server.memory.get("models"):
        return kept
    draws = {c: torch_generator(server.tools.seed, f"ifca/{c}") for c in range(1, clusters)}
    parameters = server.layout.parameters
    return {str(c): shuffled(server.state, parameters, draw) for c, draw in draws.items()}


@dataclass(frozen=True)
class ClusterModel(Objective, Settings):
    """A client's own model is its cluster's."""

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        own: State = received["models"].get(str(memory.get("cluster", 0)), {})
        return own
