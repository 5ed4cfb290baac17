"""The Gaussian mechanism on clients' changes: McMahan et al. 2018, algorithm 1, Andrew et al. 2021.

Learning Differentially Private Recurrent Language Models, arXiv:1710.06963. Differentially Private
Learning with Adaptive Clipping, arXiv:1905.03871.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.part import Capability, Server
from flsuite.aggregators.rules.mean import mixed
from flsuite.aggregators.transforms.base import FitView, Payload, Transform, clipped
from flsuite.common.arguments import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    Radius,
    Settings,
    SmallProbability,
)
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.random import secure_normal, torch_generator
from flsuite.common.state import State, Tree
from flsuite.metrics.privacy import (
    RandomDraw,
    calibrated_noise,
    default_delta,
    epsilon,
    noise_beside_count,
    require_small_delta,
)

_WITHIN = "within_clip"
"""The statistic for whether a change was within the norm: 1.0 or 0.0."""

_Normal = Callable[[int], Tensor]


@dataclass(frozen=True)
class GaussianMechanism(Transform, Settings):
    """Client-level differential privacy: clipped changes, noise on their sum, a fixed divisor.

    Take it to combine the noise of ``DPFedAvg`` with other parts.

    A client clips its change to the L2 norm ``clip``, and the server clips again. The sum gets
    Gaussian noise of standard deviation ``noise_multiplier * clip`` per number, and is divided by
    the expected cohort size. Without noise and with an infinite ``clip``, the mean is unchanged bit
    for bit.

    A client that fails, or whose update is refused, counts as a client without a change. Divisor,
    noise and epsilon are still computed for the whole cohort, so absences do not weaken the
    guarantee. An empty Poisson cohort takes a step of noise alone.

    The guarantee assumes a trusted server, and holds against anyone who sees the global model of
    every round. A server optimizer afterwards is post-processing, and objectives do not matter.
    Seed, cohorts and the clients' metrics in the log must stay secret. Noise is drawn in double
    precision and does not resist attacks on floating-point numbers (Mironov 2012).

    Every round logs ``epsilon``, ``delta``, ``clip`` and ``noise`` (the standard deviation per
    number of the model). Clients log ``update_norm``, the norm before clipping.

    Args:
        clip: Largest L2 norm of a client's change. With ``quantile``, it is the initial value.
        noise_multiplier: Standard deviation of the noise, in multiples of ``clip``. With 0 there is
            no privacy, and a warning says so.
        target_epsilon: Epsilon after ``trainer.rounds``. It determines the noise multiplier.
        delta: Delta of the guarantee, below one over the number of clients. Default: ``clients **
            -1.1``.
        quantile: Target fraction of clients whose change is not clipped (``gamma``). ``clip`` then
            adapts from round to round. Default: ``clip`` is fixed.
        clip_lr: Learning rate of the adaptive clip (``eta_C``).
        count_noise: Standard deviation of the noise on the number of unclipped changes
            (``sigma_b``). The noise on the changes is increased to compensate, so epsilon remains
            that for ``noise_multiplier``. Default: a twentieth of a cohort, as in the paper, and at
            least the noise multiplier.
        secure_rng: Draw the noise from the operating system. Such a run cannot be reproduced.
    """

    clip: Radius = 1.0
    noise_multiplier: NonNegativeFloat | None = None
    target_epsilon: PositiveFloat | None = None
    delta: SmallProbability | None = None
    quantile: Fraction | None = None
    clip_lr: PositiveFloat = 0.2
    count_noise: NonNegativeFloat | None = None
    secure_rng: bool = False

    needs = frozenset(
        {"random cohorts", "a plain sum", "only parameters", "only changes", "dense changes"}
    )

    # The client half

    def broadcast(self, server: Server) -> dict[str, Any]:
        self._begin(server)
        return {"clip": server.memory["clip"]}

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        clip = fit.received["clip"]
        payload, norm = clipped(payload, clip)
        fit.metrics["update_norm"] = norm
        if self.quantile is None:
            return payload
        return payload._replace(statistics={**payload.statistics, _WITHIN: float(norm <= clip)})

    def template(self, template: Payload) -> Payload:
        if sent := sorted(template.statistics):
            raise FlsuiteError(
                f"GaussianMechanism: clients send {sent[0]} with their change, which no noise "
                "covers; change the part of trainer.aggregator that sends it"
            )
        if self.quantile is None:
            return template
        return template._replace(statistics={**template.statistics, _WITHIN: 0.0})

    # The server half

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        # Clip again, because a client may send anything.
        payload, _ = clipped(payload, received["clip"])
        if self.quantile is None:
            return payload
        bit = min(max(float(payload.statistics[_WITHIN]), 0.0), 1.0)
        return payload._replace(statistics={**payload.statistics, _WITHIN: bit})

    def on_aggregate(self, server: Server, model: State, sums: Tree, updates: int) -> State:
        """Return ``w + (sum of clipped changes + noise) / expected``, and count the round."""
        memory, expected = server.memory, _sampling(server).expected
        memory["rounds"] += 1
        normal = self._normal(server, memory["rounds"])
        on_changes = self._on_changes(server)
        deviation = on_changes and on_changes * memory["clip"] / expected

        # A missing client counts as a client without a change.
        share = updates / expected
        model = {name: mixed(value, model[name], share) for name, value in server.state.items()}
        if deviation:
            model = {
                name: torch.add(value, normal(value.numel()).view(value.shape), alpha=deviation)
                for name, value in model.items()
            }
        delta = self._delta(server)
        spent = epsilon(_sampling(server), memory["noise_multiplier"], memory["rounds"], delta)
        server.metrics.update(epsilon=spent, delta=delta, clip=memory["clip"], noise=deviation)
        if self.quantile is not None:
            self._adapt_clip(server, sums.get(_WITHIN, 0.0), updates, normal)
        return model

    def _adapt_clip(self, server: Server, within: float, updates: int, normal: _Normal) -> None:
        """Move the clip by ``C <- C exp(-eta (b - gamma))`` (Andrew et al., algorithm 1)."""
        assert self.quantile is not None
        # Subtract 1/2 from each bit, so one client moves the sum by at most 1/2.
        total = within - 0.5 * updates + self._on_count(server) * float(normal(1))
        share = 0.5 + total / _sampling(server).expected
        server.memory["clip"] *= math.exp(-self.clip_lr * (share - self.quantile))
        server.metrics["within_clip"] = share

    def _normal(self, server: Server, round: int) -> _Normal:
        """Return a generator of float64 standard normal samples, new in every round."""
        if self.secure_rng:
            return secure_normal
        generator = torch_generator(server.tools.seed, "dp_fedavg/noise", round)
        return lambda size: torch.randn(size, generator=generator, dtype=torch.float64)

    def _on_count(self, server: Server) -> float:
        """Return the standard deviation of the noise on the number of unclipped changes."""
        if self.count_noise is not None:
            return self.count_noise
        noise = float(server.memory["noise_multiplier"])
        return max(_sampling(server).expected / 20, noise) if noise else 0.0

    def _on_changes(self, server: Server) -> float:
        """Return the standard deviation of the noise on changes, in multiples of the clip."""
        noise = float(server.memory["noise_multiplier"])
        return noise if self.quantile is None else noise_beside_count(noise, self._on_count(server))

    # Before the first round

    @property
    def withholds(self) -> dict[Capability, str]:  # type: ignore[override]
        withheld: dict[Capability, str] = {
            "plain updates": "clips every update that arrives",
            "a plain sum": "adds noise to the sum",  # a second mechanism would not cover the first
        }
        if self.quantile is not None:
            withheld["only changes"] = "sends whether its change was within the clip"
        return withheld

    def prepare(self, server: Server) -> None:
        if self.target_epsilon is not None and server.tools.rounds is None:
            raise FlsuiteError(
                "GaussianMechanism: target_epsilon needs the number of rounds; set trainer.rounds"
            )
        clients = server.layout.clients
        require_small_delta(
            "GaussianMechanism", self._delta(server), clients, "the number of clients"
        )

    def _begin(self, server: Server) -> None:
        """Set the noise of a run before its first round.

        Raises:
            FlsuiteError: If no noise reaches the target, or a resumed run would go beyond it.
        """
        memory, rounds = server.memory, server.tools.rounds
        if not memory:
            noise = self.noise_multiplier
            if self.target_epsilon is not None:
                assert rounds is not None  # prepare has refused
                target = self.target_epsilon, rounds, self._delta(server)
                noise, memory["planned"] = calibrated_noise(_sampling(server), *target), rounds
            memory.update(rounds=0, noise_multiplier=noise, clip=self.clip)
            self._announce(server)
        planned = memory.get("planned", math.inf)
        if max(rounds or 0, memory["rounds"] + 1) > planned:
            raise FlsuiteError(
                f"GaussianMechanism: the noise was set for target_epsilon {self.target_epsilon} "
                f"over {planned} rounds, and more would exceed it; set trainer.rounds to "
                f"{planned}, or start a new run"
            )
        noise = memory["noise_multiplier"]
        if self.quantile is not None and noise and self._on_count(server) <= noise / 2:
            raise FlsuiteError(
                f"GaussianMechanism: count_noise must be above {noise / 2:.4g}, half of the noise "
                f"multiplier, got {self.count_noise}"
            )

    def _announce(self, server: Server) -> None:
        noise, rounds = server.memory["noise_multiplier"], server.tools.rounds
        delta = self._delta(server)
        if not noise:
            log.warning(
                "GaussianMechanism: noise_multiplier 0 gives no privacy, epsilon is infinite; set "
                "it to 1, for example, or set target_epsilon instead"
            )
            return
        log.info("GaussianMechanism: noise multiplier %.5g, delta %.3g", noise, delta)
        if self.delta is None and delta > 0.1:
            log.warning(
                "GaussianMechanism: delta %.2g of %d clients is too large for a guarantee; set "
                "delta, for example to 1e-5",
                delta,
                server.layout.clients,
            )
        if rounds is not None:
            spent = epsilon(_sampling(server), noise, rounds, delta)
            log.info("GaussianMechanism: epsilon %.4g after %d rounds", spent, rounds)
        if self.secure_rng:
            log.warning(
                "GaussianMechanism: secure_rng draws the noise from the operating system, so the "
                "weights of this run cannot be reproduced, not even by a resume"
            )

    def _delta(self, server: Server) -> float:
        if self.delta is not None:
            return self.delta
        if server.layout.clients < 2:
            raise FlsuiteError(
                "GaussianMechanism: one client has no default delta; set delta, for example to 1e-5"
            )
        return default_delta(server.layout.clients)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise FlsuiteError(
                "GaussianMechanism: give either noise_multiplier, or target_epsilon, which sets it"
            )
        if self.clip == math.inf and (self.noise_multiplier != 0 or self.quantile is not None):
            raise FlsuiteError(
                "GaussianMechanism: an infinite clip does not bound changes; give a number"
            )


def _sampling(server: Server) -> RandomDraw:
    assert server.tools.sampling is not None  # random cohorts are declared as a need
    return server.tools.sampling
