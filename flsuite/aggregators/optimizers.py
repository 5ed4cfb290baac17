"""What the client half of an algorithm reads of a client's optimizers."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from flsuite.common.errors import FlsuiteError


def about_to_step(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the tensor and the gradient of each parameter that an optimizer will step.

    A parameter without a gradient takes no step.

    Args:
        optimizer: The optimizer. The model may have several.
        named: The model's parameters by name.
    """
    stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in named:
        if parameter.grad is not None and id(parameter) in stepping:
            yield name, parameter, parameter.grad


def base_rate(optimizer: Optimizer) -> float:
    """Return an optimizer's learning rate, or the one that a warm-up from zero leads to.

    Raises:
        FlsuiteError: If it is zero.
    """
    group = optimizer.param_groups[0]
    if rate := float(group["lr"]) or float(group.get("initial_lr", 0.0)):
        return rate
    raise FlsuiteError(
        "this aggregator divides by the optimizer's learning rate, which is 0; set a rate above 0"
    )


def optimizer_for(optimizer: Optimizer, replaced: Mapping[int, Tensor]) -> Optimizer:
    """Return a new optimizer of the same kind and settings for other tensors, without state.

    Args:
        optimizer: The original.
        replaced: The new tensors by the ``id`` of the original parameter. Others are left out.

    Raises:
        FlsuiteError: If its steps compute the loss themselves.
    """
    if isinstance(optimizer, LBFGS):
        raise FlsuiteError(
            "this aggregator steps on one gradient per batch, and LBFGS computes more; choose "
            "another optimizer"
        )
    new = copy.copy(optimizer)  # leaves out attributes of a subclass
    own = {k: v for k, v in vars(optimizer).items() if k not in vars(new) and not callable(v)}
    vars(new).update(own)
    new.param_groups = [
        {**group, "params": [replaced[id(p)] for p in group["params"] if id(p) in replaced]}
        for group in optimizer.param_groups
    ]
    new.state = defaultdict(dict)
    return new
