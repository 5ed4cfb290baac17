"""Ditto: Li et al. 2021, algorithm 1.

Ditto: Fair and Robust Federated Learning Through Personalization, arXiv:2012.04221.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives import Objective
from flsuite.aggregators.second_model import SecondModel, pulled, start_of
from flsuite.arguments import NonNegativeFloat, Settings
from flsuite.messages import ClientContext
from flsuite.state import State, difference


class Ditto(FedAvg):
    """FedAvg, and on each client a personal model that is pulled to the global one.

    A client's model takes a step on each batch of its fit, from the same batches, with the model's
    own optimizer settings: ``v_k <- v_k - eta (grad F_k(v_k) + lam (v_k - w))`` (eq. 2), where
    ``w`` is the global model that the client received. The client is scored by ``v_k``.

    The personal model starts from the global model of the client's first fit, and its optimizer
    anew in every fit. A fit costs about two fits of FedAvg. The bytes are the same.

    Args:
        lam: Weight of the pull, ``lambda``. With 0, the personal model trains alone from its start.
        kwargs: See FedAvg.
    """

    def __init__(self, lam: NonNegativeFloat = 0.1, **kwargs: Any) -> None:
        self.lam = lam
        super().__init__(objective=PulledModel(lam), **kwargs)


@dataclass(frozen=True)
class PulledModel(Objective, Settings):
    """A client's personal model, which does not change what the client sends.

    Args:
        lam: Weight of the pull to the global model.
    """

    lam: NonNegativeFloat = 0.1

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_PersonalSteps(client, self.lam)]

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("personal", {})


class _PersonalSteps(Callback):
    def __init__(self, client: ClientContext, lam: float) -> None:
        self.client, self.lam = client, lam

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        w = self.client.global_state
        start = start_of(self.client, pl_module, self.client.memory.get("personal"))
        self.personal = SecondModel(trainer, pl_module, start)
        self.w = {name: w[name].to(v.device) for name, v in self.personal.parameters.items()}

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        v = {name: value.detach() for name, value in self.personal.parameters.items()}
        gradient = self.personal.gradient(batch, batch_idx)
        if self.lam:
            gradient = pulled(gradient, difference(v, self.w), self.lam)
        self.personal.step(gradient)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.client.memory["personal"] = self.personal.state()
