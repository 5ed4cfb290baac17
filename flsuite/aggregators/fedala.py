"""FedALA: Zhang et al. 2023, algorithm 1.

FedALA: Adaptive Local Aggregation for Personalized Federated Learning, arXiv:2212.01197.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.objectives.second_steps import SecondModel, at_least_two
from flsuite.aggregators.part import ClientHalf
from flsuite.common.arguments import Fraction, NonNegativeFloat, PositiveInt, Settings
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, clone, load_

# The first time, W is learned until the last ten losses deviate by less than 0.1, like in the
# authors' code, whose loop has no other end.
_COMPARED, _SETTLED, _MOST_PASSES = 10, 0.1, 100


class FedALA(FedAvg):
    """Clients learn, element by element, what they take from the global model.

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

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_Start(client, self)]

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return memory.get("local", {})


class _Start(ClientHalf):
    part: LocalAggregation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        w, notes = self.client.global_state, self.client.memory
        if "local" not in notes or not self.part.rate:
            return
        names = self._upper(pl_module)
        model = SecondModel(trainer, pl_module, w)
        device = pl_module.device
        v, w_up = ({k: s[k].to(device) for k in names} for s in (notes["local"], w))
        weights = {k: torch.ones_like(w_up[k]) for k in names}
        weights |= {k: value.to(device) for k, value in notes.get("weights", {}).items()}

        passes = 1 if "weights" in notes else _MOST_PASSES
        self._learn(model, weights, v, w_up, passes)
        load_(pl_module.state_dict(), {k: v[k].lerp(w_up[k], weights[k]) for k in names})
        notes["weights"] = clone(weights)

    def _learn(self, model: SecondModel, weights: State, v: State, w: State, passes: int) -> None:
        """Descend along ``W``: its gradient is the model's times ``w - v`` (eq. 5)."""
        loader: Any = model.trainer.train_dataloader
        samples = max(1, round(self.part.samples * self.client.samples))
        losses: list[float] = []
        while len(losses) < passes and not has_settled(losses):
            for index, batch in enumerate(loader.plain_batches(samples, loader.data.batch_size)):
                start = {k: v[k].lerp(w[k], weights[k]) for k in weights}
                batch = at_least_two(model.trainer.strategy.batch_to_device(batch))
                at = {**model.parameters, **start}
                loss, gradient = model.loss_and_gradient(batch, index, at)
                for k, slope in gradient.items():
                    if k in weights:
                        step = self.part.rate * slope * (w[k] - v[k])
                        weights[k].sub_(step).clamp_(0, 1)
            losses.append(float(loss))  # of the last batch, as in the authors' code

    def _upper(self, module: LightningModule) -> Sequence[str]:
        """Return the parameters of the upper layers that the client received."""
        layers: dict[str, list[str]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name in self.client.global_state:
                layers.setdefault(name.rpartition(".")[0], []).append(name)
        upper = list(layers.values())[-self.part.layers :]
        return [name for names in upper for name in names]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        own = pl_module.state_dict()
        self.client.memory["local"] = clone({k: own[k] for k in self.client.global_state})


def has_settled(losses: Sequence[float]) -> bool:
    """Return whether the loss per pass has settled. It takes more passes than are compared."""
    last = torch.tensor(losses[-_COMPARED:])
    return len(losses) > _COMPARED and float(last.std(correction=0)) < _SETTLED
