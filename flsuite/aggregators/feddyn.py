"""FedDyn: Acar et al. 2021, algorithm 1.

Federated Learning Based on Dynamic Regularization, arXiv:2111.04263.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.optimizers import about_to_step
from flsuite.aggregators.part import ClientHalf, Server
from flsuite.aggregators.rules.base import Weighting, withheld_by
from flsuite.aggregators.rules.mean import Mean
from flsuite.common.arguments import PositiveFloat, Settings
from flsuite.common.messages import ClientContext, ClientUpdate
from flsuite.common.state import State, Tree, clone, load_


class FedDyn(Aggregator):
    """Each client's loss is corrected, so that its minimum becomes the federation's.

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

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_Regularizer(client, self)]


class _Regularizer(ClientHalf):
    part: Dynamic

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        start, kept = self.client.global_state, self.client.memory.get("gradient", {})
        named = {k: p for k, p in pl_module.named_parameters() if k in start}
        self.w_t = {k: start[k].to(p.device) for k, p in named.items()}
        self.g = {k: torch.zeros_like(p) for k, p in named.items()}
        load_(self.g, kept)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        for name, p, gradient in about_to_step(optimizer, pl_module.named_parameters()):
            if name in self.g:
                gradient.add_(p.detach() - self.w_t[name], alpha=self.part.alpha).sub_(self.g[name])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = dict(pl_module.named_parameters())
        change = {k: own[k].detach() - w for k, w in self.w_t.items()}
        renewed = {k: g - self.part.alpha * change[k] for k, g in self.g.items()}
        self.client.memory["gradient"] = clone(renewed)


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
