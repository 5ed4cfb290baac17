"""APFL: Deng et al. 2020, algorithm 1.

Adaptive Personalized Federated Learning, arXiv:2003.13461.
"""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives import Objective
from flsuite.aggregators.second_model import SecondModel, start_of
from flsuite.arguments import Settings, Share
from flsuite.messages import ClientContext
from flsuite.state import State


class APFL(FedAvg):
    """FedAvg, and on each client a mixture of the global model and a local one.

    A client is scored by ``alpha v_k + (1 - alpha) w``. In each step, ``v_k`` is trained through
    the mixture of ``v_k`` and the client's copy of ``w`` (eq. 5), so that its gradient has the
    factor ``alpha``. It starts from the global model of the client's first fit, and its optimizer
    anew in every fit. A fit costs about two fits of FedAvg. The bytes are the same.

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
    """A client's mixture, which does not change what the client sends.

    Args:
        alpha: Share of the local model at first.
        adaptive: Whether each client learns its share.
    """

    alpha: Share = 0.5
    adaptive: bool = True

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_MixtureSteps(client, self)]

    def own_entries(self, state: State, received: dict[str, Any], memory: dict[str, Any]) -> State:
        return _mixture(memory["local"], state, memory["alpha"]) if memory else {}


class _MixtureSteps(Callback):
    def __init__(self, client: ClientContext, settings: MixedModel) -> None:
        self.client, self.settings = client, settings

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        notes = self.client.memory
        self.alpha = notes.get("alpha", self.settings.alpha)
        self.local = SecondModel(
            trainer, pl_module, start_of(self.client, pl_module, notes.get("local"))
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Step ``v_k``, and then ``alpha``, before the model takes its own step of ``w``."""
        v = {name: value.detach() for name, value in self.local.parameters.items()}
        w = {name: p.detach() for name, p in pl_module.named_parameters() if name in v}
        gradient = self.local.gradient(batch, batch_idx, at=_mixture(v, w, self.alpha))
        slope = sum(float(((v[k] - w[k]) * own).sum()) for k, own in gradient.items())

        self.local.step({name: self.alpha * value for name, value in gradient.items()})
        if self.settings.adaptive:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.alpha = min(max(self.alpha - rate * slope, 0.0), 1.0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.client.memory |= {"local": self.local.state(), "alpha": self.alpha}
        self.client.metrics["alpha"] = self.alpha


def _mixture(v: State, w: State, alpha: float) -> State:
    """Return ``alpha v + (1 - alpha) w``, with the counters of ``v``."""
    # torch.lerp is exact at both ends.
    return {
        name: w[name].lerp(value, alpha) if value.is_floating_point() and name in w else value
        for name, value in v.items()
    }
