"""FedExP: Jhunjhunwala et al. 2023, algorithm 1.

FedExP: Speeding Up Federated Averaging via Extrapolation, arXiv:2301.09604.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.base import Weighting, withheld_by
from flsuite.aggregators.rules.mean import Mean
from flsuite.common.arguments import PositiveFloat
from flsuite.common.client import ClientContext
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree


class FedExP(Aggregator):
    """FedAvg with a server step that grows where the clients' changes cancel out.

    Take it if the server's rate should find itself: it needs no tuning.

    The step is ``max(1, sum_k p_k |D_k|^2 / (2 (|sum_k p_k D_k|^2 + eps)))`` (eq. 6), with weights
    that sum to one. The paper scores the mean of the last two models. Here the last one is scored.

    Args:
        eps: It bounds the step.
        weighting: ``uniform`` is the paper's mean. ``samples`` weights clients by their samples.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(
        self, eps: PositiveFloat = 1e-3, weighting: Weighting = "uniform", **kwargs: Any
    ) -> None:
        self.eps, self.weighting = eps, weighting
        super().__init__(rule=ExtrapolatedMean(weighting, eps=eps), **kwargs)


@dataclass(frozen=True)
class ExtrapolatedMean(Mean):
    """The rule of :class:`FedExP`.

    Args:
        eps: It bounds the step.
    """

    eps: PositiveFloat = 1e-3

    needs = frozenset({"current models", "exact changes"})
    withholds = withheld_by("the size of its change")

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        client.extras["squared_change"] = squared_change(client, w)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return {"squared_change": Statistic(0.0)}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        squared = self.weight(update) * float(update.extras["squared_change"])
        return {**super().terms(update, layout), "squared": squared}

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        mean = super().result(server, sums, updates)
        if sums["weight"] <= 0:
            return mean
        change = {k: mean[k] - server.state[k] for k in server.layout.parameters}
        square = sum(float(value.square().sum()) for value in change.values())
        step = max(1.0, sums["squared"] / sums["weight"] / (2 * (square + self.eps)))
        server.metrics["server_step"] = step
        if step == 1.0:
            return mean
        old = server.state
        return mean | {k: torch.add(old[k].double(), d, alpha=step) for k, d in change.items()}


def squared_change(client: ClientContext, w: State) -> float:
    """Return the squared norm of a client's change of the shared parameters.

    Args:
        client: The client.
        w: All entries of its trained model.
    """
    start = client.global_state
    changes = (w[name] - start[name].to(w[name].device) for name in client.layout.parameters)
    return float(sum(change.double().square().sum() for change in changes))
