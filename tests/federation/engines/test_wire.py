"""The wire to a worker: tensors, their memory format, shared memory, and interrupts."""

import multiprocessing
import os
import resource
import signal
import warnings

import psutil
import pytest
import torch
from torch import Tensor, nn

from flsuite.federation.engines.forkserver import interrupts_ignored
from flsuite.federation.engines.wire import dump_shared, load_shared, receive, send
from tests.conftest import equal_states


def test_a_process_started_here_ignores_interrupts_and_this_one_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_ignored():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(5, dtype=torch.float64),
    "float16": torch.randn(5).half(),
    "bfloat16": torch.randn(2, 3).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**62), 2**62]),
    "int32": torch.arange(4, dtype=torch.int32),
    "uint8": torch.arange(256).to(torch.uint8),
    "no_dimension": torch.tensor(3.5),
    "counter": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels_last_and_contiguous": torch.randn(2, 1, 1, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).T,
    "strided": torch.randn(10)[::3],
    "expanded": torch.randn(1, 4).expand(3, 4),
    "not_finite": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
}


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
    )


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_survive_the_wire(name: str) -> None:
    tensor = TENSORS[name].clone()
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        send(ours, {"state": {"w": TENSORS[name]}, "rest": [1, "two", None]})
        got = receive(theirs)
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)
    assert got["rest"] == [1, "two", None]
    assert same(got["state"]["w"], TENSORS[name])
    if tensor.ndim == 4:
        assert got["state"]["w"].stride() == TENSORS[name].stride()
    got["state"]["w"].zero_()  # a copy of its own, and writable
    assert same(TENSORS[name], tensor) and got["state"]["w"].count_nonzero() == 0


def test_large_tensors_of_a_message_are_kept_without_its_file() -> None:
    ours, theirs = multiprocessing.Pipe()
    before, kept = psutil.Process().num_fds(), []
    for _ in range(5):
        send(ours, [torch.randn(2**17), torch.zeros(2**17)])
        kept.append(receive(theirs)[0])
    assert psutil.Process().num_fds() == before
    files = {mapping.path for mapping in psutil.Process().memory_maps()}
    assert not any("memfd:flsuite" in path for path in files)
    kept[0].zero_()
    assert all(tensor.std() > 0.9 for tensor in kept[1:])


def test_a_message_that_finds_no_room_leaves_no_descriptor() -> None:
    ours, theirs = multiprocessing.Pipe()
    before, limits = psutil.Process().num_fds(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            send(ours, torch.zeros(2**17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert psutil.Process().num_fds() == before
    assert not theirs.poll()


def test_parameters_and_modules_survive_the_wire() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ours, theirs = multiprocessing.Pipe()
    send(ours, net)
    got = receive(theirs)
    assert equal_states(got.state_dict(), net.state_dict())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in got.parameters())


def test_shared_tensors_are_not_copied() -> None:
    descriptor, head, places = dump_shared({"tensors": TENSORS, "name": "data"})
    stored = sum(t.numel() * t.element_size() for t in TENSORS.values())
    assert (
        stored <= places[-1][1] and len(head) < 4000 and all(start % 64 == 0 for start, _ in places)
    )
    first, second = (
        load_shared(descriptor, head, places),
        load_shared(descriptor, bytes(head), places),
    )
    os.close(descriptor)
    assert first["name"] == "data" and all(
        same(first["tensors"][name], t) for name, t in TENSORS.items()
    )
    starts = [t.data_ptr() for t in first["tensors"].values() if t.numel()]
    assert [start - starts[0] for start in starts] == [start for start, _ in places], (
        "all within one mapping"
    )
    first["tensors"]["float32"].zero_()
    assert same(second["tensors"]["float32"], TENSORS["float32"]), (
        "who writes gets pages of their own"
    )


def test_an_object_without_tensors_is_shared_too() -> None:
    descriptor, head, places = dump_shared([1, 2])
    os.close(descriptor)
    assert places == [] and load_shared(-1, head, places) == [1, 2]
