"""SCAFFOLD: Karimireddy et al. 2020, algorithm 1.

Stochastic Controlled Averaging for Federated Learning, arXiv:1910.06378.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from flsuite.aggregators.fedavg import FedAvg, Weighting
from flsuite.errors import FlsuiteError, require_one_of, require_positive
from flsuite.lightning_internals import skips_step
from flsuite.messages import ClientContext, ClientUpdate
from flsuite.state import RunningMean, State, add, clone, difference

__all__ = ["SCAFFOLD"]

Control = Literal["displacement", "mean_gradient"]


class SCAFFOLD(FedAvg):
    """FedAvg with control variates, which remove the client's drift from every local step.

    A client steps along ``g - c_i + c`` (line 10), where ``c_i`` estimates its own gradient and
    ``c`` the mean gradient of all clients. Then it updates ``c_i`` (line 12, option II). The server
    keeps ``c``, the mean of all ``c_i``. Both start at zero and cover the shared parameters.
    Buffers take the mean. The correction comes before ``trainer.gradient_clip_val``.

    ``K`` steps of plain SGD with rate ``eta`` end at ``y = x - eta sum(g - c_i + c)``. So option
    II, ``c_i+ = c_i - c + (x - y) / (K eta)``, is the mean of the local gradients ``g``. ``K``
    counts every step of a fit, over all its epochs. With momentum, weight decay, clipping or a
    changing rate the displacement is not that mean. With weight decay, for example, ``c_i``
    contains ``decay * w`` and subtracts it from a step that decays anyway. ``control`` chooses
    between the two.

    Args:
        lr: The server's learning rate, ``eta_g``.
        weighting: ``uniform`` is the paper's mean. ``samples`` weights both means by training
            samples. ``c`` is then the weighted mean of the ``c_i`` if all clients take part, and
            near it otherwise.
        control: ``displacement`` is option II as written, and refuses all but plain SGD with a
            constant rate. ``mean_gradient`` takes the mean of ``g`` itself, which is the same for
            plain SGD and right for any optimizer. Momentum and weight decay then act on the
            corrected gradient.
    """

    extras_from_steps: ClassVar[bool] = True

    def __init__(
        self, lr: float = 1.0, weighting: Weighting = "uniform", control: Control = "displacement"
    ) -> None:
        super().__init__(weighting)
        self.lr = lr
        self.control = control
        require_positive("SCAFFOLD", lr=lr)
        require_one_of("SCAFFOLD", get_args(Control), control=control)

    def broadcast(self) -> dict[str, Any]:
        """Return ``c``, which is sent with ``x`` (line 5).

        Nothing is sent while ``c`` is zero.
        """
        return {"control": self.memory["control"]} if self.memory else {}

    def client_callbacks(self, client: ClientContext) -> list[Callback]:
        return [_LocalSteps(client, self.control)]

    def expected_extras(self, global_state: State) -> dict[str, Any]:
        return {"control_change": {name: global_state[name] for name in self.layout.parameters}}

    def aggregate(self, global_state: State, updates: Iterator[ClientUpdate]) -> State:
        """Return ``x + lr mean(y_i - x)``, and update ``c`` (lines 16 and 17).

        ``c`` becomes ``c + |S| / N mean(c_i+ - c_i)``.
        """
        models, changes, received = RunningMean(), RunningMean(), 0
        for update in updates:
            models.add(update.state, self.weight(update))
            changes.add(update.extras["control_change"], self.weight(update))
            received += 1

        # Buffers keep the mean: the server's rate is for parameters.
        new = models.mean()
        for name in self.layout.parameters:
            new[name] = torch.lerp(global_state[name], new[name], self.lr)

        # |S| / N: only the clients that took part have moved their share of the mean.
        control = self.memory.get("control") or _zeros(global_state, self.layout.parameters)
        self.memory["control"] = add(control, changes.mean(), received / self.layout.clients)
        return new


class _LocalSteps(Callback):
    """The client half, lines 7 to 14."""

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
        if self.plain and trainer.gradient_clip_val:
            setting = f"trainer.gradient_clip_val is {trainer.gradient_clip_val}"
            raise _refusal(self.client, setting, "unset it")

        # Tied weights are corrected once, and sent under each of their names.
        first: dict[int, str] = {}
        for name, parameter in pl_module.named_parameters(remove_duplicate=False):
            if name in self.client.global_state:
                if first.setdefault(id(parameter), name) == name:
                    self.parameters[name] = parameter
                else:
                    self.aliases[name] = first[id(parameter)]

        zeros = _zeros(self.client.global_state, (*self.parameters, *self.aliases))
        self.own: State = self.client.memory.get("control", zeros)
        self.server: State = self.client.received.get("control", zeros)
        for name, parameter in self.parameters.items():
            self.corrections[name] = (self.server[name] - self.own[name]).to(parameter.device)
            if not self.plain:
                self.gradients[name] = torch.zeros_like(parameter)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Turn ``g`` into ``g - c_i + c``, so that ``y <- y - eta (g - c_i + c)``."""
        if self.plain:
            self.rate = _constant_rate(self.client, optimizer, self.rate)

        # Its gradients are no numbers, and nothing moves.
        if skips_step(trainer, optimizer):
            return

        # A parameter that is frozen in this step takes no step, and counts none.
        stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and id(parameter) in stepping:
                self.steps[name] += 1
                # Before the correction: c_i+ is the mean of g.
                if not self.plain:
                    self.gradients[name].add_(parameter.grad)
                parameter.grad.add_(self.corrections[name])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep ``c_i+`` and send ``c_i+ - c_i``."""
        # New tensors: ``c_i`` must not change before the difference is taken.
        renewed = {name: self._renewed(name) for name in self.parameters}
        renewed |= {alias: renewed[name].clone() for alias, name in self.aliases.items()}
        self.client.extras["control_change"] = difference(renewed, self.own)
        self.client.memory["control"] = renewed

    def _renewed(self, name: str) -> Tensor:
        """Return ``c_i+`` of a parameter (line 12, option II)."""
        # A parameter that took no step has no gradient to estimate from: c_i stays.
        if not self.steps[name]:
            return self.own[name].clone()
        if not self.plain:
            # clone also moves the mean to the CPU, where the notes of a client are kept.
            return clone({name: self.gradients[name] / self.steps[name]})[name]

        # (x - y) / (K eta) is the mean of g - c_i + c: the other terms leave the mean of g.
        assert self.rate is not None
        x, y = self.client.global_state[name], self.parameters[name].detach().cpu()
        return self.own[name] - self.server[name] + (x - y) / (self.steps[name] * self.rate)


def _zeros(state: State, names: Iterable[str]) -> State:
    return {name: torch.zeros_like(state[name]) for name in names}


def _constant_rate(client: ClientContext, optimizer: Optimizer, rate: float | None) -> float:
    """Return the learning rate of plain SGD, which must not change between steps.

    ``rate`` is that of the earlier steps, or ``None`` before the first.
    """
    if not isinstance(optimizer, SGD):
        setting = f"the optimizer is {type(optimizer).__name__}"
        raise _refusal(client, setting, "use torch.optim.SGD")

    for group in optimizer.param_groups:
        for name in ("momentum", "weight_decay"):
            if group[name] != 0:
                raise _refusal(client, f"the optimizer has {name} {group[name]}", "set it to 0")
        own = float(group["lr"])
        if rate is not None and own != rate:
            setting = f"the learning rate is {rate:g} and {own:g} in one fit"
            raise _refusal(client, setting, "keep it constant")
        rate = own
    assert rate is not None
    return rate


def _refusal(client: ClientContext, setting: str, remedy: str) -> FlsuiteError:
    return FlsuiteError(
        f"SCAFFOLD: control 'displacement' needs plain SGD with one constant rate, and {setting} "
        f"(round {client.round}, client {client.id}); {remedy}, or set control to 'mean_gradient'"
    )
