"""APFL: Deng et al. 2020, algorithm 1.

Adaptive Personalized Federated Learning, arXiv:2003.13461.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective, second_start
from flsuite.common.arguments import Settings, Share
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.state import State, Tree, clone


class APFL(FedAvg):
    """FedAvg, and on each client a mixture of the global model and a local one.

    Take it if clients need the common model to different degrees.

    A client is scored by ``alpha v_k + (1 - alpha) w``. In each step, ``v_k`` is trained through
    the mixture of ``v_k`` and the client's copy of ``w`` (eq. 5), so that its gradient has the
    factor ``alpha``. It starts from the global model of the client's first fit, and its optimizer
    anew in every fit. The paper weights all clients equally: set ``weighting`` to ``uniform`` for
    this. A fit costs about two fits of FedAvg. The bytes are the same.

    Args:
        alpha: Share of the local model in the mixture, at first. With 0 this is FedAvg, with 1 the
            clients' own models train alone.
        adaptive: Whether each client learns its own ``alpha`` by gradient descent, at the model's
            learning rate (eq. 11).
        kwargs: See FedAvg.
    """

    def __init__(self, alpha: Share = 0.5, adaptive: bool = True, **kwargs: Any) -> None:
        self.alpha, self.adaptive = alpha, adaptive
        super().__init__(objective=MixedModel(alpha, adaptive), **kwargs)


@dataclass(frozen=True)
class MixedModel(Objective, Settings):
    """A client's mixture, which does not change what the client sends. See :class:`APFL`."""

    alpha: Share = 0.5
    adaptive: bool = True

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        first = next(value for value in w.values() if value.is_floating_point())
        dtype = torch.promote_types(first.dtype, torch.float32)
        alpha = torch.tensor(client.memory.get("alpha", self.alpha), dtype=dtype)
        return w, {"v": second_start(client, w, client.memory.get("local")), "alpha": alpha}

    def gradient(self, oracle: Oracle, w: State, held: Tree, batch: Any) -> tuple[State, Tree]:
        v, alpha = held["v"], held["alpha"]
        v_bar = _mixture(v, w, alpha)
        _, g, buffers = oracle.evaluate(v_bar, batch)
        own = {k: alpha.to(g[k].dtype) * g[k] for k in g}
        after = oracle.step("local", v, own) | buffers  # eq. 5
        if self.adaptive:  # eq. 11
            slope = torch.stack([((v[k] - w[k]) * g[k]).sum() for k in g]).sum()
            alpha = (alpha - oracle.rate * slope).clamp(0.0, 1.0)
        return oracle(w, batch), {"v": after, "alpha": alpha}

    def end(self, client: ClientContext, w: State, held: Tree) -> None:
        alpha = float(held["alpha"])
        client.memory |= {"local": clone(held["v"]), "alpha": alpha}
        client.metrics["alpha"] = alpha

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        if not memory:
            return {}
        alpha = torch.tensor(memory["alpha"], dtype=torch.float64)
        return _mixture(memory["local"], state, alpha)


def _mixture(v: State, w: State, alpha: Tensor) -> State:
    """Return ``alpha v + (1 - alpha) w``, with the counters of ``v``."""
    # torch.lerp is exact at both ends.
    return {
        name: w[name].lerp(value, alpha.to(value.dtype))
        if value.is_floating_point() and name in w
        else value
        for name, value in v.items()
    }
