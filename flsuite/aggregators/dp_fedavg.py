"""DP-FedAvg: McMahan et al. 2018, algorithm 1, with the clipping of Andrew et al. 2021.

Learning Differentially Private Recurrent Language Models, arXiv:1710.06963. Differentially Private
Learning with Adaptive Clipping, arXiv:1905.03871.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from torch import Tensor

from flsuite.aggregators.base import Aggregator
from flsuite.aggregators.changes import mixed
from flsuite.aggregators.clip_change import WITHIN_CLIP, ClipChange, clipped_model, wide
from flsuite.aggregators.parts import mean_by_parts
from flsuite.errors import (
    FlsuiteError,
    require_at_least,
    require_below_one,
    require_fraction,
    require_positive,
)
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.metrics.privacy import (
    calibrated_noise,
    default_delta,
    epsilon,
    noise_beside_count,
)
from flsuite.random import secure_normal, torch_generator
from flsuite.state import State, StateLayout

__all__ = ["DPFedAvg"]

log = logging.getLogger("flsuite")

Normal = Callable[[int], Tensor]


class DPFedAvg(Aggregator):
    """FedAvg with client-level differential privacy.

    A client clips its change, over all entries that travel, to the L2 norm ``clip``. The server
    clips again, adds up, adds Gaussian noise of deviation ``noise_multiplier * clip`` to every
    number, and divides by the mean size of a cohort. All clients weigh the same. Without noise and
    with an infinite ``clip`` this is ``FedAvg(weighting="uniform")``, bit for bit.

    A client that fails, or whose update is refused, counts as one without a change. Divisor, noise
    and epsilon stay those of the whole cohort, so that nobody's absence weakens the guarantee. A
    Poisson cohort that is empty takes a step of noise alone.

    The guarantee is that of a trusted server, for whoever sees the global model of every round. It
    holds while seed, cohorts and the clients' own numbers in the log stay secret. Noise is drawn in
    double precision and does not resist attacks on floating-point numbers (Mironov 2012).

    The server holds the sum and one update at a time, both in float64.

    Every round logs ``epsilon``, ``delta``, ``clip`` and ``noise`` (the deviation per number of the
    model). Clients log ``update_norm``, the norm before clipping.

    Args:
        clip: Largest L2 norm of a client's change. With ``quantile`` it is the first one.
        noise_multiplier: Deviation of the noise, in multiples of ``clip``.
        target_epsilon: Epsilon after ``trainer.rounds``. It sets the noise multiplier.
        delta: Delta of the guarantee. Default: ``clients ** -1.1``.
        quantile: Share of the clients whose change is to stay whole (``gamma``). ``clip`` then
            follows it from round to round. Default: ``clip`` is fixed.
        clip_lr: Learning rate of the adaptive clip (``eta_C``).
        count_noise: Deviation of the noise on the number of whole changes (``sigma_b``). It is paid
            for with more noise on the changes, so that epsilon stays that of ``noise_multiplier``.
            Default: a twentieth of a cohort, as in the paper, and at least the noise multiplier.
        secure_rng: Whether noise comes from the operating system. Such a run cannot be repeated.
    """

    extras_from_steps: ClassVar[bool] = True

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        quantile: float | None = None,
        clip_lr: float = 0.2,
        count_noise: float | None = None,
        secure_rng: bool = False,
    ) -> None:
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.quantile = quantile
        self.clip_lr = clip_lr
        self.count_noise = count_noise
        self.secure_rng = secure_rng
        self._check_arguments()

    # The client half

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [ClipChange(client, self.quantile is not None)]

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        return {WITHIN_CLIP: 0.0} if self.quantile is not None else {}

    # The server half

    def broadcast(self) -> dict[str, Any]:
        self._begin()
        return {"clip": self.memory["clip"]}

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        bits: list[float] = []

        def clipped(update: ClientUpdate) -> ClientUpdate:
            # Not to be believed: a client may send anything.
            if self.quantile is not None:
                bits.append(min(max(float(update.extras[WITHIN_CLIP]), 0.0), 1.0))
            model, _ = clipped_model(wide(update.state), global_state, self.memory["clip"])
            return replace(update, state=model)

        mean, arrived = mean_by_parts(map(clipped, updates), lambda update: 1.0)
        return self._stepped(global_state, mean, len(arrived), bits)

    def without_updates(self, global_state: State) -> State:
        return self._stepped(global_state, wide(global_state), 0, [])

    def _stepped(self, global_state: State, mean: State, arrived: int, bits: list[float]) -> State:
        """Return ``w + (sum of clipped changes + noise) / expected``, and count the round."""
        memory, expected = self.memory, self._sampling.expected
        memory["rounds"] += 1
        normal = self._normal(memory["rounds"])
        deviation = self._on_changes and self._on_changes * memory["clip"] / expected

        # Who is missing counts as a client without a change.
        new = mixed(wide(global_state), mean, arrived / expected)
        if deviation:
            for value in new.values():
                value.add_(normal(value.numel()).view(value.shape), alpha=deviation)

        spent = epsilon(self._sampling, memory["noise_multiplier"], memory["rounds"], self._delta)
        self.metrics.update(epsilon=spent, delta=self._delta, clip=memory["clip"], noise=deviation)
        if self.quantile is not None:
            self._adapt_clip(bits, normal)
        return {name: value.to(global_state[name].dtype) for name, value in new.items()}

    def _adapt_clip(self, bits: Sequence[float], normal: Normal) -> None:
        """Move the clip by ``C <- C exp(-eta (b - gamma))`` (Andrew et al., algorithm 1)."""
        assert self.quantile is not None
        # Each bit less 1/2, so that one client moves the sum by 1/2 at most.
        total = sum(bit - 0.5 for bit in bits) + self._on_count * float(normal(1))
        share = 0.5 + total / self._sampling.expected
        self.memory["clip"] *= math.exp(-self.clip_lr * (share - self.quantile))
        self.metrics["within_clip"] = share

    def _normal(self, round: int) -> Normal:
        """Return a source of standard normal numbers in float64, new in every round."""
        if self.secure_rng:
            return secure_normal
        generator = torch_generator(self.tools.seed, "dp_fedavg/noise", round)
        return lambda size: torch.randn(size, generator=generator, dtype=torch.float64)

    # What a run needs to know before its first round

    def configure(self, layout: StateLayout) -> None:
        super().configure(layout)
        if self.tools.sampling is None:
            raise FlsuiteError(
                "DPFedAvg: a guarantee needs cohorts that are drawn at random, and not by data, "
                "speed or availability; set trainer.schedule to Synchronous with sampling uniform "
                "or poisson, without over_selection, deadline and availability"
            )
        if layout.buffers:
            raise FlsuiteError(
                f"DPFedAvg: {layout.buffers[0]} travels and is no parameter, and noise would spoil "
                "it; set trainer.buffers to local, or take a model without BatchNorm, for example "
                "with GroupNorm"
            )
        if self.target_epsilon is not None and self.tools.rounds is None:
            raise FlsuiteError(
                "DPFedAvg: target_epsilon needs the number of rounds; set trainer.rounds"
            )
        self._sampling = self.tools.sampling
        self._is_announced = False
        self._delta = default_delta(layout.clients) if self.delta is None else self.delta
        require_below_one("DPFedAvg", delta=self._delta)

    def _begin(self) -> None:
        """Set the noise of a run before its first round.

        Raises:
            FlsuiteError: If no noise reaches the target, or a resumed run would go beyond it.
        """
        memory, rounds = self.memory, self.tools.rounds
        if not memory:
            noise = self._multiplier()
            memory.update(rounds=0, planned=rounds, noise_multiplier=noise, clip=self.clip)
        planned, done = memory["planned"], memory["rounds"]
        if self.target_epsilon is not None and max(rounds or 0, done + 1) > planned:
            raise FlsuiteError(
                f"DPFedAvg: the noise was set for target_epsilon {self.target_epsilon} over "
                f"{planned} rounds, and more would exceed it; set trainer.rounds to {planned}, or "
                "start a new run"
            )
        noise = memory["noise_multiplier"]
        if self.quantile is not None and noise and self._on_count <= noise / 2:
            raise FlsuiteError(
                f"DPFedAvg: count_noise must be above {noise / 2:.4g}, half of the noise "
                f"multiplier, got {self.count_noise}"
            )
        if not self._is_announced:
            self._announce()

    def _multiplier(self) -> float:
        """Return the noise multiplier that is accounted for."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None and self.tools.rounds is not None
        target = self.target_epsilon, self.tools.rounds
        return calibrated_noise(self._sampling, *target, self._delta)

    def _announce(self) -> None:
        noise, rounds = self.memory["noise_multiplier"], self.tools.rounds
        log.info("DPFedAvg: noise multiplier %.5g, delta %.3g", noise, self._delta)
        if rounds is not None:
            spent = epsilon(self._sampling, noise, rounds, self._delta)
            log.info("DPFedAvg: epsilon %.4g after %d rounds", spent, rounds)
        if self.secure_rng:
            log.warning(
                "DPFedAvg: secure_rng draws the noise from the operating system: no other run, and "
                "no resumed one, has the same weights"
            )
        self._is_announced = True

    @property
    def _on_count(self) -> float:
        """Return the deviation of the noise on the number of whole changes."""
        if self.count_noise is not None:
            return self.count_noise
        noise = float(self.memory["noise_multiplier"])
        return max(self._sampling.expected / 20, noise) if noise else 0.0

    @property
    def _on_changes(self) -> float:
        """Return the deviation of the noise on the changes, in multiples of the clip."""
        noise = float(self.memory["noise_multiplier"])
        return noise if self.quantile is None else noise_beside_count(noise, self._on_count)

    def _check_arguments(self) -> None:
        name = "DPFedAvg"
        if not self.clip > 0:
            raise FlsuiteError(f"{name}: clip must be positive, got {self.clip}")
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise FlsuiteError(
                f"{name}: give either noise_multiplier, or target_epsilon, which sets it"
            )
        require_at_least(name, 0, noise_multiplier=self.noise_multiplier)
        require_positive(name, target_epsilon=self.target_epsilon, delta=self.delta)
        require_below_one(name, delta=self.delta)
        if self.clip == math.inf and (self.noise_multiplier != 0 or self.quantile is not None):
            raise FlsuiteError(f"{name}: an infinite clip bounds nobody's change; give a number")
        if self.quantile is not None:
            require_fraction(name, quantile=self.quantile)
        require_positive(name, clip_lr=self.clip_lr)
        require_at_least(name, 0, count_noise=self.count_noise)
