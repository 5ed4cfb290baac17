"""FedALA: Zhang et al. 2023, algorithm 1.

FedALA: Adaptive Local Aggregation for Personalized Federated Learning, arXiv:2212.01197.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective
from flsuite.common.arguments import Fraction, NonNegativeFloat, PositiveInt, Settings
from flsuite.common.client import ClientContext
from flsuite.common.state import State, clone

# The first time, W is learned until the last ten losses deviate by less than 0.1, like in the
# authors' code, whose loop has no other end.
_COMPARED, _SETTLED, _MOST_PASSES = 10, 0.1, 100


class FedALA(FedAvg):
    """Clients learn, element by element, what they take from the global model.

    Take it if some clients gain from the global model and others lose by it.

    A fit starts from ``v_k + (w - v_k) * W`` in the upper layers and from ``w`` in the others,
    where ``v_k`` is the client's last trained model (eq. 4). ``W`` in [0, 1] is learned on a part
    of the client's samples (eq. 5). A client's first fit starts from ``w``. A client is scored by
    ``v_k``.

    A client's second fit, the first one with a ``v_k``, learns ``W`` until the loss settles: the
    losses of the last batch of the last ten passes have a standard deviation below 0.1. This takes
    11 to 100 passes, each as long as ``samples`` of an epoch. Later fits take one pass.

    Args:
        samples: Share of the samples that ``W`` is learned on.
        layers: Number of upper layers. Layers are the modules with parameters of their own.
        rate: Learning rate of ``W``. With 0 this is FedAvg.
        kwargs: See FedAvg.
    """

    def __init__(
        self,
        samples: Fraction = 0.8,
        layers: PositiveInt = 1,
        rate: NonNegativeFloat = 1.0,
        **kwargs: Any,
    ) -> None:
        self.samples, self.layers, self.rate = samples, layers, rate
        super().__init__(objective=LocalAggregation(samples, layers, rate), **kwargs)


@dataclass(frozen=True)
class LocalAggregation(Objective, Settings):
    """What a client takes from the global model. See :class:`FedALA`."""

    samples: Fraction = 0.8
    layers: PositiveInt = 1
    rate: NonNegativeFloat = 1.0

    withholds = {"only noisy gradients": "reads samples without noise when a fit starts"}

    def start(self, client: ClientContext, w: State) -> tuple[State, State]:
        notes, fit = client.memory, client.fit
        if "local" not in notes or not self.rate:
            return w, {}
        upper = upper_layers(client.layout.parameters, self.layers)
        kept = notes.get("weights", {})
        v = {k: notes["local"][k].to(w[k].device) for k in upper}
        weights = {k: kept.get(k, torch.ones_like(w[k])).to(w[k].device) for k in upper}

        samples = max(1, round(self.samples * client.samples))
        passes, losses = 1 if kept else _MOST_PASSES, list[float]()
        while len(losses) < passes and not has_settled(losses):
            for batch in fit.batches(samples, fit.batch_size):
                loss, g, _ = fit.evaluate(mixed(v, w, weights), at_least_two(batch))
                for k in g:  # eq. 5
                    step = self.rate * g[k] * (w[k] - v[k])
                    weights[k] = (weights[k] - step).clamp(0, 1)
            losses.append(float(loss))  # of the last batch, as in the authors' code

        notes["weights"] = clone(weights)
        return {**w, **mixed(v, w, weights)}, {}

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        client.memory["local"] = clone({name: w[name] for name in client.global_state})

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("local", {})


def mixed(v: State, w: State, weights: State) -> State:
    """Return ``v + (w - v) * W`` (eq. 4)."""
    return {k: v[k].lerp(w[k], weights[k]) for k in weights}


def upper_layers(parameters: Sequence[str], layers: int) -> list[str]:
    """Return the parameters of the upper layers, given all of them in the model's order."""
    named: dict[str, list[str]] = {}
    for name in parameters:
        named.setdefault(name.rpartition(".")[0], []).append(name)
    return [name for names in list(named.values())[-layers:] for name in names]


def has_settled(losses: Sequence[float]) -> bool:
    """Return whether the loss per pass has settled. It takes more passes than are compared."""
    last = torch.tensor(losses[-_COMPARED:])
    return len(losses) > _COMPARED and float(last.std(correction=0)) < _SETTLED


def at_least_two(batch: Any) -> Any:
    """Return a batch of one sample as two of them, because BatchNorm cannot train on one."""
    if extract_batch_size(batch) > 1:
        return batch
    return apply_to_collection(batch, Tensor, lambda part: torch.cat([part, part]))
