"""The change of a client that is late, applied to the global model as it is now."""

from dataclasses import replace

import torch
from torch import Tensor

from flsuite.aggregators.part import Server
from flsuite.messages import ClientUpdate

__all__ = ["rebased"]


def rebased(update: ClientUpdate, server: Server) -> ClientUpdate:
    """Return an update whose state is ``w + (w_k - base_k)``, in float64 unless it is fresh.

    A floating-point buffer that is positive in ``w`` and in ``w_k``, such as a variance, stays
    positive. Integer counters take the maximum.
    """
    if not update.state or not update.base or update.base is server.state:
        return update
    parameters = frozenset(server.layout.parameters)
    moved = {
        name: _moved(value, server.state[name], update.base[name], name in parameters)
        for name, value in update.state.items()
    }
    return replace(update, state=moved)


def _moved(value: Tensor, now: Tensor, base: Tensor, is_parameter: bool) -> Tensor:
    # The counter of an old model must not set back that of the global one.
    if not value.is_floating_point():
        return torch.maximum(value, now)
    moved = value.double() + (now.double() - base.double())
    if is_parameter:
        return moved
    # Several clients that each lower the same variance would else bring it below zero, and a
    # BatchNorm layer would return NaN.
    smaller = torch.minimum(value.double(), now.double())
    return torch.where((smaller > 0) & (moved <= 0), smaller, moved)
