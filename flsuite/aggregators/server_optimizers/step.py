"""The server's step: a torch optimizer with the round's negative change as gradient."""

from collections.abc import Iterable

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.state import State, cast


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
    try:
        if shapes:
            make_optimizer(shapes)
    except Exception as error:
        raise FlsuiteError(
            f"{key} refuses its arguments or the model's parameters ({one_line(error, 200)}); "
            "change them, or take another one, such as torch.optim.SGD"
        ) from error
    parameter = torch.zeros(2, 2, dtype=torch.float64)
    parameter.grad = torch.ones_like(parameter)
    try:
        make_optimizer([parameter]).step()
    except Exception as error:
        raise FlsuiteError(
            f"{key} cannot step with a gradient alone ({type(error).__name__}: "
            f"{one_line(error, 200)}); take another one, such as torch.optim.SGD"
        ) from error
