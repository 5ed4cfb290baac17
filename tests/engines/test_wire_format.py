"""Memory format and interrupts when objects are sent to a worker."""

import multiprocessing
import signal

import pytest
import torch

from flsuite.engines.forkserver import interrupts_ignored
from flsuite.engines.wire import receive, send


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5),
        torch.randn(3, 4).T,
        torch.randn(2, 1, 1, 5).contiguous(memory_format=torch.channels_last),
    ],
    ids=["channels_last", "contiguous", "transposed", "both"],
)
def test_values_survive_and_channels_last_stays_so(tensor: torch.Tensor) -> None:
    ours, theirs = multiprocessing.Pipe()
    send(ours, tensor)
    received = receive(theirs)
    assert torch.equal(received, tensor)
    if tensor.ndim == 4:
        assert received.stride() == tensor.stride()


def test_a_process_started_here_ignores_interrupts_and_this_one_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_ignored():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before
