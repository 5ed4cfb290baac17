"""SCAFFOLD: Karimireddy et al. 2020, Stochastic Controlled Averaging for Federated Learning, algorithm 1.

arXiv:1910.06378.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.state import RunningMean, State, add, clone, difference

__all__ = ["SCAFFOLD"]

Control = Literal["displacement", "mean_gradient"]


class SCAFFOLD(FedAvg):
    """Control variates take the client's drift out of every local step.

    A client steps along ``g - c_i + c`` (line 10): its gradient, less what its own gradients are like, plus what all
    clients' are like. Then it renews ``c_i`` (line 12, option II). The server keeps ``c``, the mean of all ``c_i``.
    Both start at zero and cover the shared parameters; buffers are averaged plainly. The correction comes before
    ``trainer.gradient_clip_val``.

    ``K`` steps of plain SGD with rate ``eta`` end at ``y = x - eta sum(g - c_i + c)``. So option II,
    ``c_i+ = c_i - c + (x - y) / (K eta)``, is the mean of the local gradients ``g``; ``K`` counts every step of a fit,
    over all its epochs. Under momentum, weight decay, clipping or a changing rate the displacement is not that mean:
    with decay, ``c_i`` would hold ``decay * w`` too, and subtract it from a step that decays anyway. Hence ``control``.

    Args:
        lr: The server's learning rate, ``eta_g``.
        weighting: ``uniform`` is the paper's mean. ``samples`` weighs both means by training samples; ``c`` is then the
            weighted mean of the ``c_i`` if all clients take part, and near it otherwise.
        control: ``displacement`` is option II as written; it refuses all but plain SGD with one constant rate.
            ``mean_gradient`` takes the mean of ``g`` itself: the same for plain SGD, and right for any optimizer, as it
            needs no rate; momentum and decay then act on the corrected gradient.
    """

    def __init__(
        self, lr: float = 1.0, weighting: Weighting = "uniform", control: Control = "displacement"
    ) -> None:
        super().__init__(weighting)
        if not 0 < lr < math.inf:
            raise FlsuiteError(
                f"SCAFFOLD: lr is the server's learning rate and must be positive, got {lr}"
            )
        if control not in get_args(Control):
            raise FlsuiteError(
                f"SCAFFOLD: control must be one of {', '.join(get_args(Control))}, got {control!r}"
            )
        self.lr = lr
        self.control = control

    def broadcast(self) -> dict[str, Any]:
        """Line 5: ``c`` goes out with ``x``. Before the first update it is zero, and nothing is sent."""
        return {"control": self.memory["control"]} if self.memory else {}

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        return {"control_change": {name: global_state[name] for name in self.layout.parameters}}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_LocalSteps(client, self.control)]

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        """Lines 16 and 17: ``x <- x + lr mean(y_i - x)``, ``c <- c + |S| / N mean(c_i+ - c_i)``."""
        models, changes, received = RunningMean(), RunningMean(), 0
        for update in updates:
            weight = update.samples if self.weighting == "samples" else 1.0
            models.add(update.state, weight)
            changes.add(update.extras["control_change"], weight)
            received += 1
        new = models.mean()
        for name in self.layout.parameters:
            new[name] = torch.lerp(global_state[name], new[name], self.lr)
        control = self.memory.get("control") or _zeros(global_state, self.layout.parameters)
        self.memory["control"] = add(control, changes.mean(), received / self.layout.clients)
        return new


class _LocalSteps(Callback):
    """Lines 7 to 14, on the client."""

    def __init__(self, client: ClientContext, control: Control) -> None:
        self.client = client
        self.plain = control == "displacement"
        self.rate: float | None = None
        self.parameters: dict[str, Parameter] = {}
        self.aliases: dict[str, str] = {}
        self.steps: Counter[str] = Counter()
        self.gradients: dict[str, Tensor] = {}
        self.corrections: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first: dict[int, str] = {}
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            if name not in self.client.global_state:
                continue
            if (
                id(parameter) in first
            ):  # tied weights take one correction, and are sent by every name
                self.aliases[name] = first[id(parameter)]
            else:
                first[id(parameter)] = name
                self.parameters[name] = parameter

        zeros = _zeros(self.client.global_state, (*self.parameters, *self.aliases))
        self.own: State = self.client.memory.get("control", zeros)
        self.server: State = self.client.received.get("control", zeros)
        for name, parameter in self.parameters.items():
            self.corrections[name] = (self.server[name] - self.own[name]).to(parameter.device)
            if not self.plain:
                self.gradients[name] = torch.zeros_like(parameter)
        if self.plain and trainer.gradient_clip_val:
            raise self._refusal(
                f"trainer.gradient_clip_val is {trainer.gradient_clip_val}", "unset it"
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """``y <- y - eta (g - c_i + c)``; a parameter that is frozen for a while takes, and counts, no step."""
        if self.plain:
            self._check(optimizer)
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and id(parameter) in stepping:
                self.steps[name] += 1
                if not self.plain:
                    self.gradients[name].add_(parameter.grad)
                parameter.grad.add_(self.corrections[name])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """``c_i+``, kept, and ``c_i+ - c_i``, sent: neither shares memory with the ``c_i`` it was made from."""
        renewed = {name: self._renewed(name) for name in self.parameters}
        for alias, name in self.aliases.items():
            renewed[alias] = renewed[name].clone()
        self.client.extras["control_change"] = difference(renewed, self.own)
        self.client.memory["control"] = renewed

    def _renewed(self, name: str) -> Tensor:
        if not self.steps[name]:
            return self.own[name].clone()
        if not self.plain:
            return clone({name: self.gradients[name] / self.steps[name]})[name]
        assert self.rate is not None
        x, y = self.client.global_state[name], self.parameters[name].detach().cpu()
        return self.own[name] - self.server[name] + (x - y) / (self.steps[name] * self.rate)

    def _check(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, SGD):
            raise self._refusal(
                f"the optimizer is {type(optimizer).__name__}", "use torch.optim.SGD"
            )
        for group in optimizer.param_groups:
            for name in ("momentum", "weight_decay"):
                if group[name] != 0:
                    raise self._refusal(f"the optimizer has {name} {group[name]}", "set it to 0")
            rate = float(group["lr"])
            if self.rate is not None and rate != self.rate:
                raise self._refusal(
                    f"the learning rate is {self.rate:g} and {rate:g} in one fit",
                    "keep it constant",
                )
            self.rate = rate

    def _refusal(self, found: str, remedy: str) -> FlsuiteError:
        return FlsuiteError(
            f"SCAFFOLD: control 'displacement' needs plain SGD with one constant rate, and {found} "
            f"(round {self.client.round}, client {self.client.id}); {remedy}, or set control to 'mean_gradient'"
        )


def _zeros(state: State, names: Iterable[str]) -> State:
    return {name: torch.zeros_like(state[name]) for name in names}
