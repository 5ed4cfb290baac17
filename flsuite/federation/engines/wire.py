"""What goes to a worker, and the worker.

Tensors travel as raw memory instead of torch's own format. cloudpickle serializes everything else,
including classes defined in a notebook or a script.
"""

import gc
import io
import mmap
import os
import pickle
import signal
import sys
import tempfile
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO, TypeVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from flsuite.common.errors import FlsuiteError, is_out_of_memory, one_line
from flsuite.common.messages import Broadcast
from flsuite.data.federated import FederatedData
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.client.setup import WorkerSetup
from flsuite.models.layers import has_gradient_hooks

CANNOT_PICKLE = (TypeError, AttributeError, pickle.PicklingError)
"""Errors raised for an object that cannot be serialized."""

Jobs = Sequence[Sequence[Any]]
"""Lists of requests. A worker may sum the models of a list."""

_Packed = TypeVar("_Packed")

_ALIGNMENT = 64
_LARGE = 2**18  # bytes of a tensor that a pipe copies slowly
_NO_BREAKPOINTS = "a worker process cannot stop at a breakpoint; use --trainer.engine InProcess"


def _rebuild(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=dtype)
    return flat.reshape(shape) if strides is None else flat.as_strided(shape, strides)


def _itself(tensor: Tensor) -> Tensor:
    """Return a tensor. A tensor on a GPU is pickled as a call of this with its copy on the CPU."""
    return tensor


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.is_cuda:  # another process may see other GPUs
            return _itself, (obj.detach().cpu(),)
        # Other tensors use torch's own format, because memory alone does not describe them.
        plain = (
            type(obj) is Tensor
            and obj.device.type == "cpu"
            and obj.layout == torch.strided
            and obj.numel() > 0
        )

        if plain and not obj.requires_grad:
            # Preserve channels_last, because the memory order affects the order of sums.
            is_dense = obj.ndim == 4 and obj.is_contiguous(memory_format=torch.channels_last)
            flat = obj.permute(0, 2, 3, 1).reshape(-1) if is_dense else obj.reshape(-1)
            return _rebuild, (
                pickle.PickleBuffer(flat.contiguous().view(torch.uint8).numpy()),
                obj.dtype,
                tuple(obj.shape),
                tuple(obj.stride()) if is_dense else None,
            )

        return super().reducer_override(obj)


def dumps(obj: Any, buffers: list[pickle.PickleBuffer] | None = None, least: int = 0) -> memoryview:
    """Serialize an object.

    With ``buffers``, the memory of plain tensors is collected there instead of being copied, except
    for tensors of fewer than ``least`` bytes.
    """

    def collect(buffer: pickle.PickleBuffer) -> bool:
        """Return whether to copy the memory."""
        if buffers is None or buffer.raw().nbytes < least:
            return True
        buffers.append(buffer)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=collect).dump(obj)
    return stream.getbuffer()


def split(setup: WorkerSetup) -> tuple[FederatedData, bytes]:
    """Return the data of a setup, which workers share, and the serialized rest.

    Every worker has its own model, which it may change.

    Raises:
        PicklingError: If a part of it cannot be sent.
    """
    if has_gradient_hooks(setup.model):
        raise pickle.PicklingError("hooks on the gradients of parameters would get lost")
    setup.model.cpu()  # workers may see other GPUs or none
    return setup.data, bytes(dumps(replace(setup, data=None)))  # type: ignore[arg-type]


def load_runner(setup: tuple[FederatedData, bytes], worker: int = 0) -> JobRunner:
    """Return the runner of a worker for a setup that :func:`split` has split."""
    data, rest = setup
    sys.breakpointhook = _refuse_breakpoint
    return JobRunner(replace(pickle.loads(rest), data=data), worker)


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> None:
    raise FlsuiteError(_NO_BREAKPOINTS)


def send(connection: Connection, obj: Any) -> None:
    """Send an object. Large tensors go through shared memory, which is faster than a pipe.

    Raises:
        ConnectionError: If the other side is gone.
        OSError: If this process has no file descriptor or no memory left.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(obj, buffers, _LARGE)
    descriptor, places = _written(buffers) if buffers else (None, [])
    try:
        connection.send_bytes(pickle.dumps(places) + head)
        if descriptor is not None:
            send_handle(connection, descriptor, None)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def receive(connection: Connection) -> Any:
    """Wait for the next object, without a limit.

    The other side may work as long as it needs. The wait ends when it dies, or an alarm kills it.

    Raises:
        EOFError: If the other side has closed.
        OSError: If the connection was cut in the middle of a message.
    """
    message = io.BytesIO(connection.recv_bytes())
    places = pickle.load(message)
    head = message.getbuffer()[message.tell() :]
    if not places:
        return pickle.loads(head)
    # Copied out of the file: a mapping would hold a descriptor and all of the message for as long
    # as one of its tensors is kept, which may be a client's memory.
    with os.fdopen(recv_handle(connection), "rb") as file:
        return pickle.loads(head, buffers=[_read(file, start, end) for start, end in places])


def _read(file: BinaryIO, start: int, end: int) -> np.ndarray:
    """Return a part of a file in memory of its own."""
    values = np.empty(end - start, dtype=np.uint8)  # unlike a bytearray, it is not zeroed before
    file.seek(start)
    if file.readinto(values) < len(values):  # type: ignore[attr-defined]
        raise EOFError("a message has lost its tensors")
    return values


def dump_shared(obj: Any) -> tuple[int, memoryview, list[tuple[int, int]]]:
    """Write the tensors of ``obj`` into one anonymous file that other processes map.

    The tensors exist once, whatever the number of processes. The file has no name, so it disappears
    with the last process that holds it, however that process ends.

    Returns:
        The file descriptor, the serialized rest of the object, and the start and end of each tensor
        in the file, in bytes.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(obj, buffers)
    descriptor, places = _written(buffers)
    return descriptor, head, places


def _written(buffers: Sequence[pickle.PickleBuffer]) -> tuple[int, list[tuple[int, int]]]:
    """Return an anonymous file with the memory of tensors, and their places in it."""
    descriptor = _anonymous_file()
    places, end = [], 0
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            for buffer in buffers:
                raw = buffer.raw()
                # Aligned, because the tensors are used in place.
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                file.seek(start)
                file.write(raw)
                end = start + len(raw)
                places.append((start, end))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, places


def load_shared(
    descriptor: int, head: bytes | memoryview, places: Sequence[tuple[int, int]]
) -> Any:
    """Load what :func:`dump_shared` wrote.

    Pages are shared until a process writes to them.
    """
    if not places:
        return pickle.loads(head)
    # Copy on write, so a worker's changes do not affect other workers.
    view = memoryview(mmap.mmap(descriptor, places[-1][1], access=mmap.ACCESS_COPY))
    return pickle.loads(head, buffers=[view[start:end] for start, end in places])


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flsuite")
    # macOS has no memfd. An unnamed temporary file is equivalent.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass
class Fatal:
    """The answer of a worker that cannot train any client.

    Attributes:
        message: One line for a user's error, else a traceback.
        is_user_error: Whether the user's settings are to blame.
    """

    message: str
    is_user_error: bool

    @classmethod
    def of(cls, error: BaseException) -> "Fatal":
        """Return the answer for an error that is being handled."""
        if is_out_of_memory(error):
            reason = f"a worker ran out of memory ({one_line(error, 200)})"
            return cls(f"{reason}; use fewer workers, or a smaller model", True)
        if isinstance(error, BdbQuit):  # pdb has found no terminal
            return cls(_NO_BREAKPOINTS, True)
        is_user_error = isinstance(error, FlsuiteError)
        return cls(one_line(error) if is_user_error else traceback.format_exc(), is_user_error)

    def error(self) -> Exception:
        """Return the error to raise in the process that started the worker."""
        if self.is_user_error:
            return FlsuiteError(self.message)
        return RuntimeError(f"a worker failed:\n{self.message}")


def answered(
    runner: JobRunner, jobs: Jobs, broadcast: Broadcast, pack: Callable[[Any], _Packed]
) -> _Packed:
    """Return the packed outcomes of jobs that start from one broadcast, a list per job.

    If they cannot be sent, the clients are trained again one by one, without sums, and those whose
    outcomes cannot be sent fail.

    Args:
        runner: The runner of the worker.
        jobs: Lists of requests without their broadcast.
        broadcast: The broadcast.
        pack: Serializes the outcomes.
    """
    whole = [[replace(request, broadcast=broadcast) for request in job] for job in jobs]
    outcomes = [runner.answer(job) for job in whole]
    try:
        return pack(outcomes)
    except CANNOT_PICKLE:
        return pack([[_sendable(runner, request) for request in job] for job in whole])


def _sendable(runner: JobRunner, request: Any) -> Any:
    """Return the outcome of a request, or a failure if the outcome cannot be sent."""
    (outcome,) = runner.answer([request])
    try:
        dumps(outcome, [])
    except CANNOT_PICKLE as error:
        return request.failure(f"its update cannot be sent: {one_line(error, 300)}")
    return outcome


def serve(
    connection: Connection, head: bytes, places: list[tuple[int, int]], threads: int, worker: int
) -> None:
    """Answer requests until the other side closes the connection.

    Args:
        connection: Delivers the file descriptor of the setup, then pairs of a broadcast and jobs,
            see :func:`answered`. Without a broadcast, the last one applies. The first message of
            the worker is ``None``: its setup is complete. Every other message is the answer to a
            pair, or :class:`Fatal`.
        head, places: The rest of the setup, as returned by :func:`dump_shared`.
        threads: torch threads.
        worker: Number of the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    torch.set_num_threads(threads)
    gc.freeze()  # garbage collection would write to shared pages, and so copy them

    try:
        descriptor = recv_handle(connection)
        runner = load_runner(load_shared(descriptor, head, places), worker)
        os.close(descriptor)
        send(connection, None)
        broadcast: Broadcast | None = None
        while True:
            newer, jobs = receive(connection)
            broadcast = newer or broadcast
            assert broadcast is not None, "a request came before its broadcast"
            answered(runner, jobs, broadcast, lambda outcomes: send(connection, outcomes))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The other side closed the connection, which stops the worker.
        return
    except (Exception, SystemExit) as error:
        with suppress(OSError):  # another worker reported the same, and the run has ended
            send(connection, Fatal.of(error))
