"""FedRep and FedBABU: head and body are trained at different times.

Collins et al. 2021, Exploiting Shared Representations for Personalized Federated Learning,
arXiv:2102.07078, algorithm 1. Oh et al. 2022, FedBABU: Toward Enhanced Representation for Federated
Image Classification, arXiv:2106.06042, algorithm 1.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.partial import HeadAware
from flsuite.common.arguments import NonNegativeInt, PositiveInt, Settings
from flsuite.common.client import ClientContext
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State


class FedRep(HeadAware):
    """Each client keeps its head. A fit trains the head first, and then the body.

    Take it if clients share features, and have few samples for a head of their own.

    The first ``head_epochs`` of ``trainer.max_epochs`` train the head with the body frozen (lines 7
    to 9), and the others the body with the head frozen (line 10). The paper weights all clients
    equally: set ``weighting`` to ``uniform`` for this.

    Args:
        head_epochs: Epochs for the head. There must be another one for the body.
        head: Prefix of the head's entries. Default: as named by the model.
        kwargs: See FedAvg.
    """

    def __init__(
        self, head_epochs: PositiveInt = 1, head: str | None = None, **kwargs: Any
    ) -> None:
        self.head_epochs = head_epochs
        super().__init__(head, **kwargs)

    def bound(self, model: LightningModule) -> Aggregator:
        head = self.head_of(model)
        return self.with_objective(HeadThenBody(head, self.head_epochs), [head])


class FedBABU(HeadAware):
    """Clients train the body, and the head keeps its initial weights.

    Take it if clients adapt the model after training, new clients too.

    The head is the same on all clients and is never sent. Set ``trainer.adapt_epochs`` to train
    head and body on each client afterwards, which is how the paper scores clients.
    """

    def bound(self, model: LightningModule) -> Aggregator:
        head = self.head_of(model)
        return self.with_objective(HeadThenBody(head, 0), [head])


@dataclass(frozen=True)
class HeadThenBody(Objective, Settings):
    """Some epochs for the head alone, and then the others for the body alone.

    Args:
        head: Prefix of the head's entries.
        head_epochs: Epochs for the head. With 0, the head is never trained.
    """

    head: str
    head_epochs: NonNegativeInt

    def trains(self, epoch: int, names: Collection[str]) -> Collection[str]:
        is_for_head = 0 <= epoch < self.head_epochs  # a warm-up is for the body
        return {name for name in names if name.startswith(self.head) == is_for_head}

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        body = [name for name in client.layout.parameters if not name.startswith(self.head)]
        if self.head_epochs and not any(map(client.fit.steps, body)):
            raise FlsuiteError(
                f"FedRep: head_epochs {self.head_epochs} leaves no step for the body; set "
                f"trainer.max_epochs to at least {self.head_epochs + 1}, and trainer.max_steps to "
                "more than the steps of the head"
            )
