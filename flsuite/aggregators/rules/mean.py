"""The mean of the clients' changes: McMahan et al. 2017, and Nguyen et al. 2022 for late clients.

Communication-Efficient Learning of Deep Networks from Decentralized Data, arXiv:1602.05629,
algorithm 1. Federated Learning with Buffered Asynchronous Aggregation, arXiv:2106.06639, algorithm
1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import LinearRule, Weighting
from flsuite.aggregators.staleness import Staleness, StalenessName, staleness_weight
from flsuite.common.arguments import NonNegativeFloat, Settings
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Tree, divided, scaled

Normalize = Literal["buffer", "weights"]


@dataclass(frozen=True)
class Mean(LinearRule, Settings):
    """The model moves by ``rate * sum q_k s(t_k) D_k / sum q_k``, with a client's change ``D_k``.

    A change is measured from the version that its client started from. If no client is late and the
    rate is 1, this is the mean of the clients' models.

    Under an asynchronous schedule, the factor of each client's change is logged as ``weight``.

    Buffers move likewise, but with a rate of at most 1. A positive buffer, such as a variance,
    stays positive. Integer counters take the maximum.

    Args:
        weighting: The weights ``q_k``. ``samples`` weights a client by its number of training
            samples, ``uniform`` weights all clients equally.
        staleness: The weight ``s(t)`` of a client that is ``t`` versions late.
        normalize: With ``buffer``, the ``q_k`` sum to one, so a buffer of late updates moves the
            model less. With ``weights``, the ``q_k s(t_k)`` sum to one.
        rate: Factor of the mean change.
    """

    weighting: Weighting = "samples"
    staleness: StalenessName | Staleness = "polynomial"
    normalize: Normalize = "buffer"
    rate: NonNegativeFloat = 1.0

    def weight(self, update: ClientUpdate) -> float:
        return float(update.samples) if self.weighting == "samples" else 1.0

    def terms(self, update: ClientUpdate, layout: StateLayout) -> Tree:
        weight = self.weight(update)
        damped = weight * staleness_weight(self.staleness, update.staleness)
        if update.part is None:  # it arrives alone, not with a cohort
            update.metrics["weight"] = damped
        return {"weight": damped, "undamped": weight, "model": scaled(update.state, damped)}

    def result(self, server: Server, sums: Tree, updates: Sequence[ClientUpdate]) -> State:
        total, undamped = sums["weight"], sums["undamped"]
        rate = self.rate
        if total > 0 and self.normalize == "buffer":
            rate *= total / undamped
        for update in updates:
            if update.part is None:
                update.metrics["weight"] *= rate / total if total > 0 else 0.0
        if total <= 0:  # all updates have weight 0
            return server.state
        mean = divided(sums["model"], total)
        parameters = frozenset(server.layout.parameters)
        return {
            name: mixed(value, mean[name], rate if name in parameters else min(rate, 1.0))
            for name, value in server.state.items()
        }

    @property
    def withholds(self) -> Mapping[Capability, str]:  # type: ignore[override]
        reasons = dict(super().withholds)
        if self.weighting != "uniform":
            reasons["a plain sum"] = "weights clients by what they claim; set weighting to uniform"
        elif self.rate != 1.0:
            reasons["a plain sum"] = "scales the sum; set its rate to 1"
        else:
            del reasons["a plain sum"]
        return reasons


def mixed(old: Tensor, new: Tensor, rate: float) -> Tensor:
    """Return ``(1 - rate) old + rate new`` in float64, or the maximum of integers.

    With a rate of 0 or 1 it is exactly one of the two, even the sign of a zero.
    """
    if not old.is_floating_point():
        return torch.maximum(old, new)
    if rate in (0.0, 1.0):
        return new if rate else old
    return torch.lerp(old.double(), new.double(), rate)


def split_buffers(state: State, layout: StateLayout) -> tuple[State, State]:
    """Split a state into its parameters, which a rule steps, and its buffers, which it averages."""
    parameters = frozenset(layout.parameters)
    buffers = {name: value for name, value in state.items() if name not in parameters}
    return {name: state[name] for name in state if name in parameters}, buffers
