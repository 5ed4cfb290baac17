"""The server's step, and adaptive optimizers: Reddi et al. 2021, algorithm 2.

Adaptive Federated Optimization, arXiv:2003.00295.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer

from flsuite.aggregators.part import Server
from flsuite.common.arguments import BelowOne, PositiveFloat, require
from flsuite.common.errors import FlsuiteError, one_line, refused_as
from flsuite.common.state import State, cast

__path__: list[str] = []  # a package in 0.2, whose modules may still be imported by their names


def stepped(make_optimizer: OptimizerCallable, server: Server, model: State) -> State:
    """Return the global state after an optimizer step with gradient ``w - model``.

    The optimizer steps float64 copies of the parameters, and the result is rounded once. Buffers
    are not optimized: they take the model's values. The optimizer's state is kept in the memory.

    Args:
        make_optimizer: Returns the optimizer of some parameters.
        server: Its memory is the optimizer's.
        model: The model of the round.
    """
    names = [name for name in server.layout.parameters if name in server.state]
    parameters = {name: server.state[name].to(torch.float64, copy=True) for name in names}
    for name, parameter in parameters.items():
        parameter.grad = parameter - model[name].to(torch.float64)
    if parameters:
        optimizer = make_optimizer(list(parameters.values()))
        if server.memory:
            optimizer.load_state_dict(dict(server.memory))
        optimizer.step()
        kept = optimizer.state_dict()
        # Plain dicts and lists, as a checkpoint holds them.
        server.memory.update(state=dict(kept["state"]), param_groups=list(kept["param_groups"]))
    return cast({**model, **parameters}, server.state)


def require_step(make_optimizer: OptimizerCallable, parameters: Iterable[Tensor]) -> None:
    """Refuse an optimizer that rejects these parameters, or needs more than a gradient.

    Raises:
        FlsuiteError: If it does, such as Muon, which accepts only matrices, or LBFGS, which needs
            the loss.
    """
    key = "trainer.aggregator.server_optimizer"
    shapes = [torch.empty(p.shape, dtype=torch.float64, device="meta") for p in parameters]
    what = f"{key} refuses its arguments or the model's parameters"
    with refused_as(what, "change them, or take another one, such as torch.optim.SGD", 200):
        if shapes:
            make_optimizer(shapes)
    parameter = torch.zeros(2, 2, dtype=torch.float64)
    parameter.grad = torch.ones_like(parameter)
    try:
        make_optimizer([parameter]).step()
    except Exception as error:
        raise FlsuiteError(
            f"{key} cannot step with a gradient alone ({type(error).__name__}: "
            f"{one_line(error, 200)}); take another one, such as torch.optim.SGD"
        ) from error


class Adaptive(Optimizer):
    """``w <- w - lr m / (sqrt(v) + tau)`` with ``m <- beta1 m + (1 - beta1) g``.

    The subclass updates ``v``. As in the paper, there is no bias correction, and ``v`` starts at
    ``tau ** 2``.

    Args:
        params: The parameters.
        lr: Learning rate, eta.
        beta1: Decay of the first moment, in [0, 1).
        tau: Adaptivity, above 0. A larger value is closer to plain momentum.
        decays: Further decay rates of the subclass, in [0, 1).
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, beta1: float, tau: float, **decays: float
    ) -> None:
        require(type(self).__name__, PositiveFloat, lr=lr, tau=tau)
        require(type(self).__name__, BelowOne, beta1=beta1, **decays)
        super().__init__(params, {"lr": lr, "beta1": beta1, "tau": tau, **decays})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step along the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                g, slots = parameter.grad, self.state[parameter]
                if not slots:
                    slots["m"] = torch.zeros_like(parameter)
                    slots["v"] = torch.full_like(parameter, group["tau"] ** 2)  # the paper's start
                m, v = slots["m"], slots["v"]
                m.mul_(group["beta1"]).add_(g, alpha=1 - group["beta1"])
                self.update_second(v, g.square(), group)
                parameter.sub_(group["lr"] * m / (v.sqrt() + group["tau"]))

    @abstractmethod
    def update_second(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        """Update the second moment with ``g ** 2``, in place."""


class AdaptiveAdagrad(Adaptive):
    """The adaptive optimizer with ``v <- v + g^2``.

    Take it as the server optimizer of any aggregator.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, beta1, tau)

    def update_second(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        v.add_(square)


class AdaptiveAdam(Adaptive):
    """The adaptive optimizer with ``v <- beta2 v + (1 - beta2) g^2``.

    Take it as the server optimizer of any aggregator.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        super().__init__(params, lr, beta1, tau, beta2=beta2)

    def update_second(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        v.mul_(group["beta2"]).add_(square, alpha=1 - group["beta2"])


class AdaptiveYogi(AdaptiveAdam):
    """The adaptive optimizer with ``v <- v - (1 - beta2) g^2 sign(v - g^2)``.

    Take it as the server optimizer of any aggregator.
    """

    def update_second(self, v: Tensor, square: Tensor, group: dict[str, Any]) -> None:
        v.sub_((1 - group["beta2"]) * square * torch.sign(v - square))
