"""The injected faults that happen on a client."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsuite.common.messages import ClientResult, ClientUpdate, Fault


def carry_out(fault: Fault, result: ClientResult) -> ClientResult:
    """Inject a fault into a fit, and return what the fit sends, if anything.

    Called after the training, so all side effects of the training in this process are present for
    the next client. NaNs and wrong shapes are put into the final message, because packing could
    remove a wrong shape.

    Args:
        fault: The fault. ``late``, ``twice`` and ``gone`` affect the message's delivery and are
            handled elsewhere.
        result: The result of the fit.

    Raises:
        RuntimeError: If the fault is ``raises``.
    """
    if fault == "raises":
        raise RuntimeError("raised on purpose (schedule.raises)")
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault == "hangs":
        time.sleep(60)
    if fault in ("nan", "shapes"):
        return replace(result, update=_spoiled(fault, result.update))
    return result


def _spoiled(fault: Fault, update: ClientUpdate) -> ClientUpdate:
    """Return an update with a NaN or a wrong shape.

    A message without floating-point tensors, such as from a client that shares nothing, gets an
    unexpected entry.
    """
    place = next(_floats([update.state, update.extras]), None)
    if place is None:
        return replace(update, state={**update.state, "fault": torch.tensor(float("nan"))})
    parent, key = place
    value = parent[key].clone(memory_format=torch.contiguous_format)
    if fault == "nan":
        value.view(-1)[0] = float("nan")
    parent[key] = value if fault == "nan" else value.unsqueeze(0)
    return update


def _floats(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and the key of each tensor that can hold a NaN."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield node, key
        elif isinstance(value, (dict, list)):
            yield from _floats(value)
