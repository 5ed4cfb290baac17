"""MOON: Li, He and Song 2021, algorithm 1.

Model-Contrastive Federated Learning, arXiv:2103.16257.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.objectives.feature_term import FeatureTerm
from flsuite.aggregators.part import ClientHalf
from flsuite.aggregators.partial import HeadAware
from flsuite.common.arguments import NonNegativeFloat, PositiveFloat, Settings
from flsuite.common.client import ClientContext
from flsuite.common.state import State, clone


class MOON(HeadAware):
    """FedAvg with a contrastive term: features stay near the global model's.

    Take it for images with skewed classes, if features of the clients drift apart.

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
        return self.with_objective(Contrast(self.head_of(model), self.mu, self.temperature))


@dataclass(frozen=True)
class Contrast(FeatureTerm, Settings):
    """The contrastive term. See :class:`MOON`."""

    mu: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5

    @property
    def half(self) -> ClientHalf:
        return self if self.mu else Objective()

    def start(self, client: ClientContext, w: State) -> tuple[State, dict[str, State]]:
        last = client.memory.get("last")
        return w, {"received": client.global_state, "last": last} if last else {}

    def compared(self, features_of: Callable[[State], Tensor], held: Any) -> list[Tensor]:
        return [features_of(held[model]) for model in ("received", "last") if model in held]

    def term(self, z: Tensor, others: list[Tensor], batch: Any, held: Any) -> Tensor:
        if not others:
            return z.new_zeros(())
        similarities = [F.cosine_similarity(z, other, dim=1) for other in others]
        logits = torch.stack(similarities, dim=1) / self.temperature
        return -self.mu * logits.log_softmax(1)[:, 0].mean()  # eq. 3; column 0 is z_g

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        client.memory["last"] = clone({name: w[name] for name in client.global_state})
