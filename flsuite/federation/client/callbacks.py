"""Callbacks of every client's fit, independent of the algorithm, and learning-rate decay.

Under heterogeneity, FedAvg with a constant learning rate does not converge to the optimum: the
remaining distance is of the order of the rate (Li et al. 2020, On the Convergence of FedAvg on
Non-IID Data, arXiv:1907.02189, section 4).
"""

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.halves import Halves
from flsuite.common.arguments import Fraction, PositiveInt, Settings
from flsuite.common.client import ClientContext
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import loss_of, scaler_of, skips_step
from flsuite.common.state import State
from flsuite.data.loader import TrainLoader
from flsuite.federation.client.fit import OneFit, OneSteps
from flsuite.models.abilities import extra_epochs


class SampleGradients(ABC):
    """A callback that computes the gradient of a step from the gradients of its samples."""

    @abstractmethod
    def begin(self, loader: TrainLoader) -> None:
        """Begin a client's fit."""

    @abstractmethod
    def gradient(self, samples: State, parameters: State, index: int) -> State:
        """Return the gradient of a step.

        Args:
            samples: The gradients of the samples by parameter, ``(samples, ...)``.
            parameters: All trainable parameters, for shapes.
            index: The number of the batch in its epoch.
        """


class FitRecord(Callback):
    """Records the losses and the skipped steps of a fit, and lets the algorithm change its steps.

    No loss is read from the device, and none is logged, before the fit ends. The steps of a model's
    warm-up (``extra_epochs``) are counted separately, because their loss may be another function.

    Args:
        halves: What the algorithm does. Default: nothing.
        client: The client's view of the round.
        continues: Whether the optimizers continue from the client's last fit.

    Attributes:
        skipped: Number of steps that the gradient scaler of ``16-mixed`` has skipped, because
            gradients overflow.
    """

    def __init__(
        self, halves: Halves | None, client: ClientContext, continues: bool = False
    ) -> None:
        self._halves, self._client, self._continues = halves, client, continues
        self._steps: OneSteps | None = None
        self._warmup, self._name, self._has_scaler = 0, "loss", False
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self.skipped = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warmup, self._has_scaler = extra_epochs(pl_module), scaler_of(trainer) is not None
        if self._halves is None or self._halves.trains_plainly:
            return
        loader: Any = trainer.train_dataloader
        fit = OneFit(trainer, pl_module, loader, continues=self._continues)
        self._steps = OneSteps(self._halves, self._client, fit)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._name = "warmup_loss" if trainer.current_epoch < self._warmup else "loss"
        if self._steps:
            self._steps.begin_epoch(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._steps:
            self._steps.begin_step(batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._has_scaler and skips_step(trainer, optimizer):
            self.skipped += 1
        elif self._steps:
            self._steps.change(optimizer, _is_last_step(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        if self._steps:
            self._steps.end_step()
        loss = loss_of(outputs)
        if loss is None:
            return
        # Manual optimization may return a float.
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss)
        if trainer.accumulate_grad_batches != 1 and pl_module.automatic_optimization:
            # Lightning has divided it, because gradients of several batches are summed.
            loss = loss * trainer.accumulate_grad_batches
        # In place and on the device, because reading the value would synchronize.
        if self._name in self._totals:
            self._totals[self._name].add_(loss)
        else:
            self._totals[self._name] = loss.clone()
        self._counts[self._name] = self._counts.get(self._name, 0) + 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._steps:
            self._steps.end()

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        if self._steps:
            self._steps.close()

    @property
    def losses(self) -> int:
        """Return the number of steps with a loss."""
        return sum(self._counts.values())

    def numbers(self) -> dict[str, float]:
        """Return ``loss``, which is NaN without a step, ``warmup_loss`` and ``skipped_steps``."""
        means = {name: float(total) / self._counts[name] for name, total in self._totals.items()}
        skipped = {"skipped_steps": float(self.skipped)} if self.skipped else {}
        # NaN instead of 0, because a fit without a step must not look perfect.
        return {"loss": float("nan"), **means, **skipped}


def _is_last_step(trainer: Trainer) -> bool:
    is_last_epoch = trainer.current_epoch + 1 >= (trainer.max_epochs or 1)
    is_last_batch = trainer.is_last_batch and is_last_epoch
    return is_last_batch or trainer.global_step + 1 == trainer.max_steps


class LRDecay(ABC):
    """Multiplies the learning rates of all clients' optimizers by one factor per round.

    The factor depends only on the round, so a resumed or extended run continues as it would have
    without the interruption. Within a round, it is constant.
    """

    @abstractmethod
    def factor(self, round: int) -> float:
        """Return the factor of a round, above 0.

        Rounds count from 1.
        """


@dataclass(frozen=True)
class CosineDecay(LRDecay, Settings):
    """Half a cosine from 1 in the first round to ``final`` in round ``rounds + 1``, then constant.

    Take it if the number of rounds is known.

    Args:
        rounds: Rounds over which the rate decays, usually ``trainer.rounds``.
        final: The factor at the end.
    """

    rounds: PositiveInt
    final: Fraction = 0.01

    def factor(self, round: int) -> float:
        # A run extended beyond ``rounds`` keeps the final factor.
        done = min((round - 1) / self.rounds, 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class ExponentialDecay(LRDecay, Settings):
    """``gamma`` to the power of the number of completed rounds.

    Take it if the number of rounds is open.

    Args:
        gamma: Factor from one round to the next.
    """

    gamma: Fraction = 0.99

    def factor(self, round: int) -> float:
        return float(self.gamma ** (round - 1))


@dataclass(frozen=True)
class StepDecay(LRDecay, Settings):
    """A factor that is multiplied by ``gamma`` every ``every`` rounds.

    Take it to follow a paper that lowers its rate in steps.

    Args:
        every: Rounds between two steps.
        gamma: Factor per step.
    """

    every: PositiveInt
    gamma: Fraction = 0.1

    def factor(self, round: int) -> float:
        return float(self.gamma ** ((round - 1) // self.every))


class FitOptimizers(Callback):
    """Prepares a client's optimizers for a fit, and keeps their states for its next fit.

    The learning rates are scaled before the first step. Accumulated state (momentum, moments) is
    kept. Settings such as the learning rate are not: the model sets them for each fit. Otherwise, a
    schedule inside a fit, or ``trainer.lr_decay``, would compound from round to round.

    Args:
        factor: Factor of the model's own learning rates in this round. Default: they stay.
        kept: The state dicts of the optimizers from the client's last fit, if any.
        keeps: Whether to keep them.

    Attributes:
        states: The state dicts of the optimizers after the fit, on the CPU.
    """

    def __init__(
        self, factor: float | None, kept: list[dict[str, Any]] | None, keeps: bool
    ) -> None:
        self._factor, self._kept, self._keeps = factor, kept, keeps
        self.states: list[dict[str, Any]] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not strict, because there is nothing to restore before the client's first fit.
        for optimizer, kept in zip(trainer.optimizers, self._kept or (), strict=False):
            settings = optimizer.state_dict()["param_groups"]
            # Copy, because load_state_dict keeps references to its tensors.
            optimizer.load_state_dict(
                {"state": copy.deepcopy(kept["state"]), "param_groups": settings}
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._factor is None:
            return
        # A scheduler would overwrite the scaled rates at its first step.
        if trainer.lr_scheduler_configs:
            raise FlsuiteError(
                f"trainer.lr_decay and the scheduler of {type(pl_module).__name__}."
                "configure_optimizers would both set the learning rate; leave one of them out"
            )
        # Every fit has new optimizers, so the factor does not compound.
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= self._factor

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._keeps:
            # Copy, because the state dict aliases the optimizer's tensors.
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]
            self.states = move_data_to_device(states, torch.device("cpu"))
