"""The faults on purpose that a client carries out itself."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsuite.messages import ClientResult, ClientUpdate, Fault


def carry_out(fault: Fault, result: ClientResult) -> ClientResult:
    """Let a fit fail as it was told to, and return what it sends, if it sends anything.

    It is called after the training: all that the training has changed in this process is then in
    the way of the next client. A NaN or a wrong shape is put into the message, because packing may
    take a wrong shape away.

    Args:
        fault: The fault. Those of the message's way, ``late``, ``twice`` and ``gone``, happen
            elsewhere.
        result: What the fit would send.

    Raises:
        RuntimeError: If the client is to raise.
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
    """Return an update with a NaN or a wrong shape in it.

    A message without floating numbers, such as that of a client that shares nothing, gets an entry
    that nobody asked for.
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
    """Yield the place of each tensor that can hold a NaN, as what holds it and its key there."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield node, key
        elif isinstance(value, (dict, list)):
            yield from _floats(value)
