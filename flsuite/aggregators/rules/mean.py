"""Means of changes, and means of models.

- The mean of the clients' changes: McMahan et al. 2017, Communication-Efficient Learning of Deep
  Networks from Decentralized Data, arXiv:1602.05629, algorithm 1. For late clients: Nguyen et al.
  2022, Federated Learning with Buffered Asynchronous Aggregation, arXiv:2106.06639, algorithm 1.
- Mixing: Xie, Koyejo, Gupta 2019, Asynchronous Federated Optimization, arXiv:1903.03934, algorithm
  1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.base import Contribution, LinearRule, Reduction, Rule, Weighting
from flsuite.aggregators.staleness import Staleness, StalenessName, staleness_weight
from flsuite.common.arguments import Fraction, NonNegativeFloat, Settings, Share
from flsuite.common.errors import FederationError, FlsuiteError
from flsuite.common.messages import ClientUpdate
from flsuite.common.state import State, StateLayout, Sums, Tree, cast, divided, scaled

Normalize = Literal["buffer", "weights"]


@dataclass(frozen=True)
class Mean(LinearRule, Settings):
    """The model moves by ``rate * sum q_k s(t_k) D_k / sum q_k``, with a client's change ``D_k``.

    Take it unless you need another one: it is the default.

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


def quotient(
    total: Tensor, weight: Tensor, least: float = 0.0, otherwise: Tensor | float = 0.0
) -> Tensor:
    """Return ``total / weight``, or ``otherwise`` where the weight is not above ``least``."""
    known = weight > least
    # Divide by 1 elsewhere, because 0 / 0 would be NaN even if not selected.
    return torch.where(known, total / torch.where(known, weight, 1.0), otherwise)


def split_buffers(state: State, layout: StateLayout) -> tuple[State, State]:
    """Split a state into its parameters, which a rule steps, and its buffers, which it averages."""
    parameters = frozenset(layout.parameters)
    buffers = {name: value for name, value in state.items() if name not in parameters}
    return {name: state[name] for name in state if name in parameters}, buffers


@dataclass(frozen=True)
class Mixing(Rule, Settings):
    """Mixes in the clients' models one after the other, ``w <- (1 - a) w + a w_k``.

    Take it if each client's model is mixed in as it arrives.

    ``a = mixing * s(t_k) * q_k``. Floating-point buffers are mixed likewise, and integer counters
    take the maximum. ``a`` is logged as ``weight``.

    Args:
        mixing: The mixing rate. Multiplied by the weight of a fresh update, it must be at most 1.
        staleness: The weight ``s(t)`` of a client that is ``t`` versions late.
        weighting: With ``uniform``, ``q_k`` is 1. With ``samples``, it is the client's fraction of
            all training samples of the federation.
    """

    mixing: Fraction = 0.5
    staleness: StalenessName | Staleness = "polynomial"
    weighting: Weighting = "uniform"
    needs = frozenset({"each update"})

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_mixture(f"{type(self).__name__}: mixing", self.mixing, self.staleness)

    def begin(self, server: Server, contribution: Contribution | None = None) -> Reduction:
        return _Mixture(self, server, contribution)

    def rate(self, update: ClientUpdate, samples: int) -> float:
        """Return ``a``, given the number of training samples of the federation."""
        damped = self.mixing * staleness_weight(self.staleness, update.staleness)
        return damped * self._share(update, samples)

    def _share(self, update: ClientUpdate, samples: int) -> float:
        """Return ``q_k``.

        Raises:
            FederationError: If the client claims more samples than the federation has. The rate
                could then exceed 1.
        """
        if self.weighting == "uniform":
            return 1.0
        if update.samples > samples:
            raise FederationError(
                f"{type(self).__name__}: client {update.client} claims {update.samples} training "
                f"samples in round {update.round}, but the federation has {samples}; correct the "
                "client, or set weighting to 'uniform'"
            )
        return update.samples / samples


class _Mixture(Reduction):
    """The model of a round so far, into which each client's model is mixed as it arrives."""

    def __init__(self, rule: Mixing, server: Server, contribution: Contribution | None) -> None:
        self._rule, self._samples = rule, server.layout.samples
        self._state, self._sums, self._contribution = server.state, Sums(), contribution

    def add(self, update: ClientUpdate) -> None:
        if self._contribution is not None:
            self._sums.add(self._contribution(update))
        rate = self._rule.rate(update, self._samples)
        new = {k: mixed(value, update.state[k], rate) for k, value in self._state.items()}
        self._state = cast(new, self._state)
        update.metrics["weight"] = rate

    def finish(self) -> tuple[State, Tree]:
        return self._state, self._sums.values


@dataclass(frozen=True)
class MixedMean(Mean):
    """Mixes in a buffer of models at a time, ``w <- w + rate sum q_k s(t_k) (w_k - w)``.

    Take it with late clients, if their models should count and not their changes.

    It is the :class:`~flsuite.aggregators.Mean` of the clients' models instead of their changes,
    which only differ for late clients.

    Args:
        weighting: See :class:`~flsuite.aggregators.Mean`.
        staleness: The weight ``s(t)`` of a client that is ``t`` versions late.
        normalize: See :class:`~flsuite.aggregators.Mean`.
        rate: The mixing rate, from 0 to 1. Multiplied by the weight of a fresh update, it must be
            at most 1.
    """

    weighting: Weighting = "uniform"
    staleness: StalenessName | Staleness = "constant"
    normalize: Normalize = "buffer"
    rate: Share = 0.5

    rebases = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize == "buffer":
            _require_mixture(f"{type(self).__name__}: rate", self.rate, self.staleness)


def _require_mixture(name: str, rate: float, staleness: StalenessName | Staleness) -> None:
    """Refuse a mixing rate that exceeds 1 for a fresh update."""
    fresh = staleness_weight(staleness, 0)
    if rate * fresh > 1:
        raise FlsuiteError(
            f"{name} times the weight of a fresh update must be at most 1, got {rate} * {fresh}; "
            "lower one of them"
        )
