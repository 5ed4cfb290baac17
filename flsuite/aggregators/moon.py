"""MOON: Li, He and Song 2021, algorithm 1.

Model-Contrastive Federated Learning, arXiv:2103.16257.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.feature_term import FeatureTerm
from flsuite.aggregators.part import ClientHalf
from flsuite.aggregators.partial import HeadAware
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Settings
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, clone


class MOON(HeadAware):
    """FedAvg with a contrastive term: features stay near the global model's.

    With the features ``z`` of the client's model, ``z_g`` of the received one and ``z_p`` of the
    client's last own one, a sample's term is
    ``- mu log(exp(sim(z, z_g) / t) / (exp(sim(z, z_g) / t) + exp(sim(z, z_p) / t)))`` (eq. 3). A
    client's first fit has no last own model and no term.

    The paper adds a projection of two layers in front of the head. Here the features are the
    head's input. A fit costs two more forward passes. It sends as many bytes as FedAvg.

    Args:
        mu: Weight of the term. With 0 this is FedAvg.
        temperature: ``t``.
        head: Prefix of the head's entries. Default: as named by the model.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        mu: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 0.5,
        head: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.mu, self.temperature = mu, temperature
        super().__init__(head, **kwargs)

    def bound(self, model: LightningModule) -> Aggregator:
        head = self.head_of(model)
        return self.with_objective(Contrast(head, self.mu, self.temperature))


@dataclass(frozen=True)
class Contrast(FeatureTerm, Settings):
    """The contrastive term. See :class:`MOON`."""

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    def callbacks(self, client: ClientContext) -> list[Callback]:
        if not self.mu:
            return []
        term = super().callbacks(client) if "last" in client.memory else []
        return [*term, _Keep(client, self)]

    def read(self, client: ClientContext, module: LightningModule) -> dict[str, State]:
        models = {"received": client.global_state, "last": client.memory["last"]}
        return {
            kind: {name: value.to(module.device) for name, value in state.items()}
            for kind, state in models.items()
        }

    def compared(
        self, features_of: Callable[[State], Tensor], held: dict[str, State]
    ) -> list[Tensor]:
        return [features_of(held["received"]), features_of(held["last"])]

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        similarity = [F.cosine_similarity(features, other, dim=1) for other in others]
        logits = torch.stack(similarity, dim=1) / self.temperature
        return -self.mu * logits.log_softmax(1)[:, 0].mean()


class _Keep(ClientHalf):
    """Keeps the client's trained model for its next fit."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = pl_module.state_dict()
        self.client.memory["last"] = clone({k: own[k] for k in self.client.global_state})
