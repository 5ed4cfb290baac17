"""SCAFFOLD: Karimireddy et al. 2020, algorithm 1, and its control variates.

Stochastic Controlled Averaging for Federated Learning, arXiv:1910.06378.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch.optim import SGD

from flsuite.aggregators.fedavg import FedAvg
from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.part import Server, Statistic
from flsuite.aggregators.rules.base import Weighting
from flsuite.common.arguments import PositiveFloat, Settings
from flsuite.common.client import ClientContext, Oracle
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, StateLayout, Tree, add, cast, clone, difference

Control = Literal["displacement", "mean_gradient"]


@dataclass(frozen=True)
class ControlVariates(Objective, Settings):
    """Control variates remove the client drift from every local step.

    Take it to combine SCAFFOLD's correction with other parts.

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

    def start(self, client: ClientContext, w: State) -> tuple[State, Tree]:
        needs_sum = self.control == "mean_gradient"
        if not needs_sum:
            _require_plain_sgd(client)
        c, c_i = _variates(client)
        total = _zeros(w, client.layout.parameters) if needs_sum else {}
        return w, {"correction": difference(c, c_i), "sum": total}

    def gradient(self, oracle: Oracle, w: State, held: Tree, batch: Any) -> tuple[State, Tree]:
        g, correction = oracle(w, batch), held["correction"]
        # Before the correction, because c_i+ is the mean of g.
        total = {k: value + g[k] if k in g else value for k, value in held["sum"].items()}
        for k in g.keys() & correction.keys():
            g[k] = g[k] + correction[k]  # g - c_i + c (line 10)
        return g, {"correction": correction, "sum": total}

    def end(self, client: ClientContext, w: State, held: Tree) -> None:
        """Keep ``c_i+`` (line 14) and send ``c_i+ - c_i``. Without a step, ``c_i`` stays."""
        x, (c, c_i) = client.global_state, _variates(client)
        new, steps = clone(c_i), {k: n for k in c_i if (n := client.fit.steps(k))}
        if self.control == "mean_gradient":
            new |= clone({k: held["sum"][k] / steps[k] for k in steps})
        elif steps:
            eta = _constant_rate(client, (g for one in client.fit.taken for g in one.settings))
            y = clone({k: w[k] for k in steps})
            for k in steps:  # line 12, option II
                new[k] = c_i[k] - c[k] + (x[k] - y[k]) / (steps[k] * eta)
        client.memory["control"] = new
        client.extras["control_change"] = difference(new, c_i)

    def statistics(self, layout: StateLayout, state: State) -> dict[str, Statistic]:
        controls = {name: state[name] for name in layout.parameters}
        return {"control_change": Statistic(controls, from_steps=True)}

    def conclude(self, server: Server, means: Tree, updates: int) -> None:
        """Update ``c <- c + |S| / N mean(c_i+ - c_i)`` (line 17)."""
        if not updates:
            return
        # |S| / N, because only the cohort's terms of the mean have changed.
        c = server.memory.get("control") or _zeros(server.state, server.layout.parameters)
        change = cast(means["control_change"], c)
        server.memory["control"] = add(c, change, updates / server.layout.clients)


def _zeros(state: State, names: Iterable[str]) -> State:
    return {name: torch.zeros_like(state[name]) for name in names}


def _variates(client: ClientContext) -> tuple[State, State]:
    """Return ``c`` and ``c_i``."""
    zeros = _zeros(client.global_state, client.layout.parameters)
    return client.received.get("control", zeros), client.memory.get("control", zeros)


def _constant_rate(client: ClientContext, groups: Iterable[Mapping[str, Any]]) -> float:
    """Return the learning rate of plain SGD, given the settings of all its parameter groups."""
    rates = dict[float, None]()
    for group in groups:
        for name in ("momentum", "weight_decay", "maximize"):
            if group[name] != 0:
                raise _refusal(client, f"the optimizer has {name} {group[name]}", "set it to 0")
        rates[float(group["lr"])] = None
    first, *others = rates
    if first == 0:
        raise _refusal(client, "the learning rate is 0", "raise it")
    if others:
        setting = f"the learning rate is {first:g} and {others[0]:g} in one fit"
        raise _refusal(client, setting, "keep it constant")
    return first


def _require_plain_sgd(client: ClientContext) -> None:
    """Refuse what is known at the start of a fit."""
    if client.fit.clips:
        raise _refusal(client, "trainer.gradient_clip_val is set", "unset it")
    for optimizer in client.fit.optimizers:
        if not isinstance(optimizer, SGD):
            setting = f"the optimizer is {type(optimizer).__name__}"
            raise _refusal(client, setting, "use torch.optim.SGD")
    _constant_rate(client, (g for one in client.fit.optimizers for g in one.param_groups))


def _refusal(client: ClientContext, setting: str, remedy: str) -> FlsuiteError:
    return FlsuiteError(
        "ControlVariates: control 'displacement' needs plain SGD with one constant rate, but "
        f"{setting} "
        f"(round {client.round}, client {client.id}); {remedy}, or set control to 'mean_gradient'"
    )


class SCAFFOLD(FedAvg):
    """FedAvg with :class:`~flsuite.aggregators.ControlVariates`.

    Take it if data differ much, clients come back often, and the optimizer is plain SGD.

    The server moves to ``x + lr mean(y_i - x)`` (lines 16 and 17). Buffers are averaged.

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
