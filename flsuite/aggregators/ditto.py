"""Ditto: Li et al. 2021, algorithm 1.

Ditto: Fair and Robust Federated Learning Through Personalization, arXiv:2012.04221.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.second_steps import SecondSteps, pulled, start_of
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, difference


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
class PulledModel(SecondSteps, Settings):
    """A client's personal model, which does not change what the client sends.

    Args:
        lam: Weight of the pull to the global model.
    """

    lam: NonNegativeFloat = 0.1

    def start(self, client: ClientContext, module: LightningModule) -> tuple[State, State]:
        own, w = dict(module.named_parameters()), client.global_state
        received = {name: w[name].to(p.device) for name, p in own.items() if name in w}
        return start_of(client, module, client.memory.get("personal")), received

    def direction(
        self, gradient: State, v: State, w: State, held: State, rate: float
    ) -> tuple[State, State]:
        return (pulled(gradient, difference(v, held), self.lam) if self.lam else gradient), held

    def end(self, client: ClientContext, weights: State, held: State) -> None:
        client.memory["personal"] = weights

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("personal", {})
