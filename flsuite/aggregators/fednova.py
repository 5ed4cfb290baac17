"""FedNova: Wang et al. 2020, algorithm 1.

Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
arXiv:2007.07481.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective, Proximal
from flsuite.aggregators.optimizers import base_rate, optimizer_for
from flsuite.aggregators.part import ClientHalf, Server, Statistic
from flsuite.aggregators.rules.base import LinearRule, withheld_by
from flsuite.aggregators.rules.mean import mixed, split_buffers
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.lightning_internals import skips_step
from flsuite.common.messages import ClientContext, ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, clone, divided, scaled


class FedNova(Aggregator):
    """The mean of the clients' changes per step, times the mean number of steps.

    ``w <- w + tau_eff sum_k p_k (w_k - w) / |a_k|`` with ``tau_eff = sum_k p_k |a_k|`` (eq. 9).
    ``|a_k|`` is the number of plain steps that client k's steps are worth: more with momentum,
    fewer with a proximal term (section 3). If it is the same for all clients, this is FedAvg.

    Args:
        mu: Weight of a proximal term, as in FedProx.
        kwargs: See :class:`~flsuite.aggregators.Aggregator`.
    """

    def __init__(self, mu: NonNegativeFloat = 0.0, **kwargs: Any) -> None:
        self.mu = mu
        objective = Proximal(mu) if mu else Objective()
        super().__init__(rule=NormalizedMean(mu), objective=objective, **kwargs)


@dataclass(frozen=True)
class NormalizedMean(LinearRule, Settings):
    """The rule of :class:`FedNova`.

    Args:
        mu: Weight of the clients' proximal term.
    """

    mu: NonNegativeFloat = 0.0

    weighting = "samples"
    withholds = withheld_by("the worth of its steps")

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_Worth(client, self)]

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        return {"plain_steps": Statistic(0.0, from_steps=True)}

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        p, a = self.weight(update), float(update.extras["plain_steps"])
        per_step = p / a if a > 0 else 0.0
        model, buffers = split_buffers(update.state, layout)
        return {
            "weight": p,
            "steps": p * a,
            "per_step": per_step,
            "model": scaled(model, per_step),
            "buffers": scaled(buffers, p),
        }

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        if sums["per_step"] <= 0:
            return server.state
        tau_eff = sums["steps"] / sums["weight"]
        server.metrics["tau_eff"] = tau_eff
        # sum_k p_k (w_k - w) / |a_k|, as a step towards a mean with the weights p_k / |a_k|.
        rate = tau_eff * sums["per_step"] / sums["weight"]
        mean = divided(sums["model"], sums["per_step"])
        model = {name: mixed(server.state[name], value, rate) for name, value in mean.items()}
        return model | divided(sums["buffers"], sums["weight"])


class _Worth(ClientHalf):
    """Finds ``|a_k|``: how far the optimizer moves a number whose gradient is always one."""

    part: NormalizedMean
    optimizer: Optimizer | None = None
    counted: Optimizer | None = None
    shared: Sequence[Tensor] = ()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self.counted is None:
            shared = [p for k, p in pl_module.named_parameters() if k in self.client.global_state]
            self.counted, self.shared = _of_shared(trainer.optimizers, shared)
        # Only one optimizer's steps count, without the ones that a gradient scaler skips. A step of
        # private parameters alone, as in a warm-up, moves nothing that is sent.
        moves = any(p.grad is not None for p in self.shared)
        if optimizer is not self.counted or not moves or skips_step(trainer, optimizer):
            return
        if self.optimizer is None:
            self.number = torch.zeros(1, dtype=torch.float64, requires_grad=True)
            first = optimizer.param_groups[0]
            self.optimizer = optimizer_for(optimizer, {id(first["params"][0]): self.number})
            if _goes_on(optimizer):
                kept = clone(self.client.memory.get("optimizer", {}))
                self.optimizer.state[self.number].update(kept)
            self.rate = base_rate(optimizer)
        for own, other in zip(self.optimizer.param_groups, optimizer.param_groups, strict=True):
            own |= {key: value for key, value in other.items() if key != "params"}
            own["weight_decay"] = 0.0
        self.number.grad = 1.0 + self.part.mu * self.number.detach()
        self.optimizer.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        moved = 0.0 if self.optimizer is None else -float(self.number.detach()) / self.rate
        self.client.extras["plain_steps"] = moved
        if self.optimizer is not None and (state := self.optimizer.state.get(self.number)):
            self.client.memory["optimizer"] = clone(state)


def _of_shared(
    optimizers: Sequence[Optimizer], shared: Sequence[Tensor]
) -> tuple[Optimizer | None, list[Tensor]]:
    """Return the first optimizer with a shared parameter, and which of them it has."""
    for optimizer in optimizers:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own := [p for p in shared if id(p) in held]:
            return optimizer, own
    return None, []


def _goes_on(optimizer: Optimizer) -> bool:
    """Return whether an optimizer was kept from the last fit, such as its momentum."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())
