"""The faults on purpose that a client carries out itself."""

import os
import signal
import time

from torch import Tensor

from flsuite.messages import Fault
from flsuite.state import State

__all__ = ["carry_out"]


def carry_out(fault: Fault | None, state: State) -> State:
    """Let a fit fail as it was told to, and return the state that it sends.

    It is called after the training: all that the training has changed in this process is then in
    the way of the next client.

    Args:
        fault: The fault. Those of the message's way, ``late`` and ``twice``, happen elsewhere.
        state: The trained shared state, which may be changed.

    Raises:
        RuntimeError: If the client is to raise.
    """
    if fault == "raises":
        raise RuntimeError("raised on purpose (schedule.raises)")
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault == "hangs":
        time.sleep(60)
    name = _first_floats(state)
    if fault == "nan" and name is not None:
        state[name].reshape(-1)[:1] = float("nan")
    if fault == "shapes" and name is not None:
        state[name] = state[name].unsqueeze(0)
    return state


def _first_floats(state: State) -> str | None:
    """Return the name of the first entry that can hold a NaN."""

    def can_be_nan(value: Tensor) -> bool:
        return value.is_floating_point() and value.numel() > 0

    return next((name for name, value in state.items() if can_be_nan(value)), None)
