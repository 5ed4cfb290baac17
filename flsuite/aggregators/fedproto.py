"""FedProto: Tan et al. 2022, algorithm 1.

FedProto: Federated Prototype Learning across Heterogeneous Clients, arXiv:2105.00243.
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.losses import loss_at
from flsuite.aggregators.objectives.feature_term import (
    FeatureTerm,
    as_rows,
    classes_of,
    inputs_of,
    shape_of,
)
from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.partial import HeadAware
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.client import ClientContext
from flsuite.common.state import State, StateLayout, Tree
from flsuite.data.loader import TrainLoader
from flsuite.models.modes import evaluating


class FedProto(HeadAware):
    """Clients share the mean features of each class, and no weights.

    Take it if weights must not travel, or would be too large to send.

    A client adds ``lam`` times the mean squared distance of its samples' features to the global
    prototypes of their classes (eq. 7, per feature). After its fit, it sends the sums of its
    features by class. The server's prototype of a class is the mean over all samples of the class,
    and stays where no client of the round has the class. Eq. 6 also divides this mean by the number
    of clients that have the class, which would pull features towards zero. With
    ``weighting="uniform"``, each client counts as if it had as many samples as any other. A client
    is scored by its own model with its own head, not by the nearest prototype.

    Args:
        lam: Weight of the distance, ``lambda``. With 0, clients train alone.
        head: Prefix of the head's entries. The features are its input. Default: as named by the
            model.
        kwargs: See FedAvg.
    """

    def __init__(self, lam: NonNegativeFloat = 1.0, head: str | None = None, **kwargs: Any) -> None:
        self.lam = lam
        super().__init__(head, **kwargs)

    def bound(self, model: LightningModule) -> Aggregator:
        head = self.head_of(model)
        shape = shape_of(model, head)
        return self.with_objective(Prototypes(head, lam=self.lam, shape=shape), ["*"])


@dataclass(frozen=True, kw_only=True)
class Prototypes(FeatureTerm, Settings):
    """The distance to the global prototypes, and the client's sums of features by class.

    Args:
        head: Prefix of the head's entries.
        lam: Weight of the distance.
        shape: Numbers of classes and of features.
    """

    lam: NonNegativeFloat
    shape: tuple[int, int]

    withholds = {"only changes": "sends the mean features of each class, which no noise covers"}

    def broadcast(self, server: Server) -> dict[str, Any]:
        return dict(server.memory)

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        return w, {**self._unknown(), **client.received}

    def term(self, features: Tensor, others: list[Tensor], batch: Any, held: State) -> Tensor:
        y = classes_of(batch, "FedProto")
        distance = (features - held["prototypes"][y]).square().mean(1)
        return self.lam * (distance * held["known"][y]).mean()

    def measure(self, client: ClientContext, module: LightningModule, loader: TrainLoader) -> None:
        """Send the sums of the features by class, per sample of the client."""
        sums, counts = self._unknown().values()
        trainer: Any = None  # of no use in full precision
        with evaluating(module), torch.no_grad(), inputs_of(module, self.head) as seen:
            for index, batch in enumerate(loader.plain_batches()):
                moved = module.transfer_batch_to_device(batch, module.device, 0)
                batch = module.on_after_batch_transfer(moved, 0)
                y = classes_of(batch, "FedProto").cpu()
                loss_at(trainer, module, {}, batch, index, in_full=True)
                sums.index_add_(0, y, as_rows(seen.pop()).float().cpu())
                counts += torch.bincount(y, minlength=len(counts))
        samples = counts.sum()
        client.extras |= {"features": sums / samples, "classes": counts / samples}

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        # Per sample of the client: the server's mean is weighted by samples.
        sums, counts = self._unknown().values()
        return {"features": Statistic(sums), "classes": Statistic(counts)}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Update the prototypes of the classes that some client of the round has."""
        if not updates:
            return
        old = server.memory or self._unknown()
        seen = means["classes"] > 0
        fresh = means["features"] / means["classes"].clamp(min=1e-12)[:, None]
        server.memory["prototypes"] = torch.where(seen[:, None], fresh.float(), old["prototypes"])
        server.memory["known"] = torch.maximum(old["known"], seen.float())

    def _unknown(self) -> State:
        """Return the prototypes before any class is known, in float32."""
        shapes = {"prototypes": self.shape, "known": self.shape[:1]}
        return {name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
