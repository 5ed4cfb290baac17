"""FedNova: Wang et al. 2020, algorithm 1.

Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
arXiv:2007.07481.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flsuite.aggregators.aggregator import Aggregator
from flsuite.aggregators.objectives.base import Objective, Proximal
from flsuite.aggregators.optimizers import base_rate, optimizer_for
from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.base import LinearRule, withheld_by
from flsuite.aggregators.rules.mean import mixed, split_buffers
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.client import ClientContext
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, clone, divided, scaled


class FedNova(Aggregator):
    """The mean of the clients' changes per step, times the mean number of steps.

    Take it if clients take different numbers of steps.

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

    def end(self, client: ClientContext, w: State, held: Any) -> None:
        """Send ``|a_k|``: how far the optimizer moves a number whose gradient is always one."""
        client.extras["plain_steps"] = 0.0
        # A step of private parameters alone, as in a warm-up, moves nothing that is sent.
        taken = [one for one in client.fit.taken if one.names & {*client.layout.parameters}]
        if not taken:
            return
        # Only the steps of the model's first optimizer among them count.
        own = min((one.optimizer for one in taken), key=client.fit.optimizers.index)
        taken = [one for one in taken if one.optimizer is own]

        number = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = optimizer_for(own, {id(own.param_groups[0]["params"][0]): number})
        if client.fit.continues:
            optimizer.state[number].update(clone(client.memory.get("optimizer", {})))
        for one in taken:
            optimizer.param_groups[0] |= {**one.settings[0], "weight_decay": 0.0}
            for _ in range(one.steps):
                number.grad = 1.0 + self.mu * number.detach()
                optimizer.step()
        client.extras["plain_steps"] = -float(number.detach()) / base_rate(taken[0].settings[0])
        if state := optimizer.state[number]:
            client.memory["optimizer"] = clone(state)

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
