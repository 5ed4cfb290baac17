"""What the client half of an algorithm reads of a client's optimizers."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from flsuite.common.errors import FlsuiteError


def base_rate(settings: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group, or the one that a warm-up from zero leads to.

    Raises:
        FlsuiteError: If it is zero.
    """
    if rate := float(settings["lr"]) or float(settings.get("initial_lr", 0.0)):
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
