"""SCAFFOLD: Karimireddy et al. 2020, algorithm 1, and its control variates.

Stochastic Controlled Averaging for Federated Learning, arXiv:1910.06378.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import SGD, Optimizer

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.optimizers import about_to_step
from flsuite.aggregators.part import ClientHalf, Server, Statistic
from flsuite.aggregators.rules.base import Weighting
from flsuite.common.arguments import PositiveFloat, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.lightning_internals import skips_step
from flsuite.common.messages import ClientContext
from flsuite.common.state import State, StateLayout, Tree, add, difference

Control = Literal["displacement", "mean_gradient"]


@dataclass(frozen=True)
class ControlVariates(Objective, Settings):
    """Control variates remove the client drift from every local step.

    A client steps along ``g - c_i + c`` (line 10), where ``c_i`` estimates its own gradient and
    ``c`` the mean gradient of all clients. Then it updates ``c_i`` (line 12, option II). The server
    keeps ``c``, the mean of all ``c_i`` (line 17). Both start at zero and cover the shared
    parameters. The correction is applied before ``trainer.gradient_clip_val``. The change of
    ``c_i`` is not tied to a version of the model, so ``c`` stays the mean with late clients too.

    ``K`` steps of plain SGD with rate ``eta`` end at ``y = x - eta sum(g - c_i + c)``. So option
    II, ``c_i+ = c_i - c + (x - y) / (K eta)``, is the mean of the local gradients ``g``. ``K``
    counts every step of a fit, over all its epochs. With momentum, weight decay, clipping or a
    changing rate, the displacement is not that mean. With weight decay, for example, ``c_i``
    contains ``decay * w`` and subtracts it from a step that already decays. ``control`` chooses
    between the two.

    Args:
        control: ``displacement`` is option II as written. It requires plain SGD with a constant
            rate. ``mean_gradient`` uses the mean of ``g`` itself, which is identical for plain SGD
            and correct for any optimizer. Momentum and weight decay then act on the corrected
            gradient.
    """

    control: Control = "displacement"

    withholds = {"only changes": "sends control variates with every change, which no noise covers"}

    def broadcast(self, server: Server) -> dict[str, Any]:
        # c is sent with x (line 5), unless it is zero.
        return {"control": server.memory["control"]} if server.memory else {}

    def callbacks(self, client: ClientContext) -> list[Callback]:
        return [_LocalSteps(client, self)]

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        controls = {name: state[name] for name in layout.parameters}
        return {"control_change": Statistic(controls, from_steps=True)}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Update ``c <- c + |S| / N mean(c_i+ - c_i)`` (line 17)."""
        if not updates:
            return
        # |S| / N, because only the cohort's terms of the mean have changed.
        names = server.layout.parameters
        control = server.memory.get("control") or _zeros(server.state, names)
        change = {name: means["control_change"][name].to(control[name].dtype) for name in names}
        server.memory["control"] = add(control, change, updates / server.layout.clients)


class _LocalSteps(ClientHalf):
    """The client half, lines 7 to 14."""

    part: ControlVariates

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.plain = self.part.control == "displacement"
        self.rate: float | None = None
        self.steps, self.gradients, self.corrections = Counter[str](), State(), State()
        if self.plain and trainer.gradient_clip_val:
            setting = f"trainer.gradient_clip_val is {trainer.gradient_clip_val}"
            raise _refusal(self.client, setting, "unset it")

        named, shared = pl_module.named_parameters(), self.client.global_state
        self.parameters = {name: parameter for name, parameter in named if name in shared}
        zeros = _zeros(shared, self.parameters)
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

        # The gradients are not finite, and the step is skipped.
        if skips_step(trainer, optimizer):
            return

        # K does not count a parameter that is frozen in this step.
        for name, _, gradient in about_to_step(optimizer, self.parameters.items()):
            self.steps[name] += 1
            # Before the correction: c_i+ is the mean of g.
            if not self.plain:
                self.gradients[name].add_(gradient)
            gradient.add_(self.corrections[name])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep ``c_i+`` and send ``c_i+ - c_i``."""
        # New tensors: ``c_i`` must not change before the difference is computed.
        renewed = {name: self._renewed(name) for name in self.parameters}
        self.client.extras["control_change"] = difference(renewed, self.own)
        self.client.memory["control"] = renewed

    def _renewed(self, name: str) -> Tensor:
        """Return ``c_i+`` of a parameter (line 12, option II)."""
        # Without a step, there is no gradient to estimate from, and c_i stays.
        if not self.steps[name]:
            return self.own[name].clone()
        if not self.plain:
            # On the CPU, where client memories are kept. Gradients may have a graph.
            return (self.gradients[name] / self.steps[name]).detach().cpu()

        # (x - y) / (K eta) is the mean of g - c_i + c. The other terms reduce it to the mean of g.
        assert self.rate is not None
        x, y = self.client.global_state[name], self.parameters[name].detach().cpu()
        return self.own[name] - self.server[name] + (x - y) / (self.steps[name] * self.rate)


def _zeros(state: State, names: Iterable[str]) -> State:
    return {name: torch.zeros_like(state[name]) for name in names}


def _constant_rate(client: ClientContext, optimizer: Optimizer, rate: float | None) -> float:
    """Return the learning rate of plain SGD, which must not change between steps.

    ``rate`` is the rate of earlier steps, or ``None`` before the first.
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
        "ControlVariates: control 'displacement' needs plain SGD with one constant rate, but "
        f"{setting} "
        f"(round {client.round}, client {client.id}); {remedy}, or set control to 'mean_gradient'"
    )


class SCAFFOLD(FedAvg):
    """FedAvg with :class:`~flsuite.aggregators.ControlVariates`.

    The server moves to ``x + lr mean(y_i - x)`` (line 16). Buffers are averaged.

    Args:
        lr: The server's learning rate, ``eta_g``.
        weighting: ``uniform`` is the paper's mean. ``samples`` weights both means by training
            samples. ``c`` is then the weighted mean of the ``c_i`` if all clients take part, and
            close to it otherwise.
        control: See :class:`~flsuite.aggregators.ControlVariates`.
        server_optimizer: Another server step instead of ``lr``.
        kwargs: See FedAvg.
    """

    _weighting = "uniform"

    def __init__(
        self,
        lr: PositiveFloat = 1.0,
        weighting: Weighting = "uniform",
        control: Control = "displacement",
        server_optimizer: OptimizerCallable | None = None,
        **kwargs: Any,
    ) -> None:
        self.lr, self.control = lr, control
        if server_optimizer is not None and lr != 1.0:
            raise FlsuiteError("SCAFFOLD: server_optimizer has a learning rate; leave out lr")
        step = None if lr == 1.0 else partial(SGD, lr=lr)
        super().__init__(
            weighting=weighting,
            objective=ControlVariates(control),
            server_optimizer=server_optimizer or step,
            **kwargs,
        )
