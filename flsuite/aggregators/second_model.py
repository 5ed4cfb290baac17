"""A second set of weights that a client trains in the same fit."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from flsuite.aggregators.losses import loss_and_gradient
from flsuite.aggregators.optimizers import optimizer_for
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, clone
from flsuite.models.layers import entry_names


class SecondModel:
    """Weights that a client trains next to its model's, with a copy of the model's optimizers.

    The optimizers start anew in every fit, also with ``trainer.keep_optimizers``.

    Args:
        trainer: The Trainer of the fit, which has started.
        module: The model.
        start: Initial weights: entries of the model's state dict.

    Attributes:
        parameters: The trainable ones, on the model's device.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, start: State) -> None:
        self.trainer, self.module = trainer, module
        own = module.state_dict()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        copies = {name: torch.empty_like(own[name]).copy_(value) for name, value in start.items()}
        self.parameters = {
            name: copies.pop(name).requires_grad_() for name in trained if name in copies
        }
        self._buffers = copies
        replaced = {id(trained[name]): value for name, value in self.parameters.items()}
        self._optimizers = [optimizer_for(one, replaced) for one in trainer.optimizers]

    @property
    def rate(self) -> float:
        """Return the learning rate of the model's first optimizer."""
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function unchanged: these are the tensors of one client."""
        return function

    def gradient(self, batch: Any, index: int, at: Mapping[str, Tensor] | None = None) -> State:
        """Return the gradient of the loss on a batch, see :meth:`loss_and_gradient`."""
        return self.loss_and_gradient(batch, index, at)[1]

    def loss_and_gradient(
        self, batch: Any, index: int, at: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, State]:
        """Return the loss on a batch, and its gradient.

        Args:
            batch: A batch on the model's device.
            index: Its number in the epoch.
            at: Other values of the parameters. Default: their own.
        """
        weights = self.parameters if at is None else at
        own = {name: weights[name] for name in self.parameters}
        return loss_and_gradient(self.trainer, self.module, own, batch, index, self._buffers)

    def step(self, gradient: State) -> None:
        """Take one step of the optimizers, with the present settings of the model's own.

        The Trainer's clipping applies, but not hooks of the model.
        """
        for name, parameter in self.parameters.items():
            parameter.grad = gradient.get(name)
        self._clip([p for p in self.parameters.values() if p.grad is not None])
        for own, others in zip(self._optimizers, self.trainer.optimizers, strict=True):
            for group, other in zip(own.param_groups, others.param_groups, strict=True):
                # Schedulers change the rate, and some the momentum.
                group.update({key: value for key, value in other.items() if key != "params"})
            own.step()

    def state(self) -> State:
        """Return a CPU snapshot of the weights."""
        return clone({**self.parameters, **self._buffers})

    def _clip(self, parameters: list[Tensor]) -> None:
        if not (limit := self.trainer.gradient_clip_val):
            return
        by_value = self.trainer.gradient_clip_algorithm == "value"
        (clip_grad_value_ if by_value else clip_grad_norm_)(parameters, float(limit))


def start_of(client: ClientContext, module: LightningModule, kept: State | None) -> State:
    """Return the initial weights of a second model: the weights of the last fit, if any.

    Buffers that stay with the client are the second model's own. Buffers that the fit has reset
    stay reset.

    Args:
        client: The client's view of the round.
        module: The model at the start of the fit.
        kept: What :meth:`SecondModel.state` returned in the client's last fit.
    """
    own, parameters = module.state_dict(), dict(module.named_parameters())
    buffers = {name: own[name] for name in entry_names(module) if name not in parameters}
    reset = {name: own[name] for name in client.layout.reset}
    return {**buffers, **(kept or client.global_state), **reset}


def pulled(gradient: State, pull: State, weight: float) -> State:
    """Return ``gradient + weight pull``. An entry without a gradient is pulled alone."""
    return {
        name: gradient[name].add(own, alpha=weight) if name in gradient else weight * own
        for name, own in pull.items()
    }


def at_least_two(batch: Any) -> Any:
    """Return a batch of one sample as two of them, because BatchNorm cannot train on one."""
    if extract_batch_size(batch) > 1:
        return batch
    return apply_to_collection(batch, Tensor, lambda part: torch.cat([part, part]))
