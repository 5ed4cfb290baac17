"""Ditto: Li et al. 2021, algorithm 1.

Ditto: Fair and Robust Federated Learning Through Personalization, arXiv:2012.04221.
"""

from dataclasses import dataclass
from typing import Any

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective, pulled, second_start
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.state import State, Tree, clone


class Ditto(FedAvg):
    """FedAvg, and on each client a personal model that is pulled to the global one.

    Take it for personal models if no layers are to stay private. A fit costs twice as much.

    On each batch, ``v <- v - eta (grad F_k(v) + lam (v - w_t))`` (eq. 2), by a copy of the model's
    optimizer, where ``w_t`` is the global model. ``v`` starts from the client's first ``w_t``, and
    the copy anew in every fit. The client is scored by ``v``. A fit costs about two of FedAvg.

    Args:
        lam: Weight of the pull, ``lambda``. With 0, the personal model trains alone.
        kwargs: See FedAvg.
    """

    def __init__(self, lam: NonNegativeFloat = 0.1, **kwargs: Any) -> None:
        self.lam = lam
        super().__init__(objective=PulledModel(lam), **kwargs)


@dataclass(frozen=True)
class PulledModel(Objective, Settings):
    """A personal model, which does not change what the client sends. See :class:`Ditto`."""

    lam: NonNegativeFloat = 0.1

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        w_t = {name: client.global_state[name] for name in client.layout.parameters}
        return w, {"w_t": w_t, "v": second_start(client, w, client.memory.get("personal"))}

    def gradient(self, oracle: Oracle, w: State, held: Tree, batch: Any) -> tuple[State, Tree]:
        v, w_t = held["v"], held["w_t"]
        _, g, buffers = oracle.evaluate(v, batch)
        if self.lam:
            g = pulled(g, {k: v[k] - w_t[k] for k in w_t}, self.lam)
        v = oracle.step("personal", v, g) | buffers
        return oracle(w, batch), {"w_t": w_t, "v": v}

    def end(self, client: ClientContext, w: State, held: Tree) -> None:
        client.memory["personal"] = clone(held["v"])

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("personal", {})
