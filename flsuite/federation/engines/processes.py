"""Engine with persistent worker processes: one import, model and Trainer per worker."""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from flsuite.common.arguments import PositiveFloat, PositiveInt, Threads
from flsuite.common.errors import FederationError
from flsuite.common.messages import Broadcast, ClientFailure, ClientResult, OwnScores
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.forkserver import (
    prepare_workers,
    prepare_workers_early,
    without_main,
)
from flsuite.federation.engines.pool import Job, Pool, Worker, cores
from flsuite.federation.engines.wire import Fatal, Jobs, dump_shared, receive, send, serve, split

_SETUP = 600.0  # maximum seconds of a worker's setup, which takes a few
_END = 5.0  # maximum seconds until a killed process has ended


@dataclass(eq=False, kw_only=True)
class _Process(Worker):
    """A worker process.

    Attributes:
        broadcast: The last broadcast sent to it.
        alarm: Kills it when its fit takes too long.
        timed_out: Whether the alarm went off.
        is_gone: Whether its last call could not be sent to it.
    """

    process: Any
    connection: Connection
    broadcast: Broadcast | None = None
    alarm: threading.Timer | None = None
    timed_out: bool = False
    is_gone: bool = False


@dataclass(eq=False)
class Processes(Pool):
    """Trains in worker processes.

    Take it on a machine with several cores or GPUs.

    Workers are forked from a server process that has imported everything and computed nothing, so
    starting or replacing one takes milliseconds. The server starts when the first engine is
    constructed. On Linux without a GPU, it is a fork of this process: construct the engine before
    loading the data. The dataset is in memory once. A worker that dies is replaced, and its client
    is retried once.

    On GPUs, worker ``i`` uses the ``i``-th GPU that ``trainer.devices`` allows, by default of all
    visible ones. With fewer GPUs than workers, several workers share one.

    Args:
        workers: Number of processes. Default: the cores available to this process.
        threads: torch threads per worker.
        timeout: Maximum seconds of one client's fit. A worker that takes longer is replaced, and
            its client counts as failed. Default: no limit.
    """

    workers: PositiveInt | None = None
    threads: Threads = 1
    timeout: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._payload: tuple[int, bytes, list[tuple[int, int]]] | None = None
        prepare_workers_early()

    def _open(self, setup: WorkerSetup) -> int:
        prepare_workers()
        with self._sendable("the model, the aggregator or the data"):
            descriptor, head, places = dump_shared(split(setup))
        self._payload = (descriptor, bytes(head), places)
        return self.workers or cores()

    def _spawn(self, number: int) -> _Process:
        assert self._payload is not None
        descriptor, head, places = self._payload
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        arguments = (theirs, head, places, self.threads, number)
        process = context.Process(target=serve, args=arguments, daemon=True)
        with without_main():
            # It waits for the server without a limit. The server imports flsuite only.
            process.start()
        # Leave this end open only in the worker, so its death closes the connection.
        theirs.close()
        with suppress(OSError, RuntimeError):  # it just died, which its connection will show
            reduction.send_handle(ours, descriptor, process.pid)
        return _Process(number, process=process, connection=ours)

    def _send(self, worker: _Process, broadcast: Broadcast, jobs: Jobs) -> None:
        self._arm(worker)  # before sending, because a worker that hangs does not receive
        # Once per round and worker, because the global model dominates the traffic.
        newer = None if worker.broadcast is broadcast else broadcast
        try:
            send(worker.connection, (newer, jobs))
            worker.broadcast = broadcast
        except ConnectionError:  # it just died, which its connection will show
            worker.is_gone = True

    def _arm(self, worker: _Process) -> None:
        """Start an alarm that kills the worker unless it answers in time, even if it hangs."""
        if (limit := self._limit(worker.calls[0][0][0])) is None:
            return

        def kill() -> None:
            worker.timed_out = True
            worker.process.kill()

        worker.alarm = threading.Timer(limit, kill)
        worker.alarm.daemon = True
        worker.alarm.start()

    def _wait(self) -> None:
        waiting: dict[Any, _Process] = {
            worker.connection: worker
            for worker in self._pool
            if worker.calls or not worker.is_ready
        }
        # A fit takes as long as it does, and a worker's alarm ends the wait. A setup is short.
        are_ready = all(worker.is_ready for worker in waiting.values())
        connections = wait(list(waiting), None if are_ready else _SETUP)
        if not connections:
            raise FederationError(
                f"Processes: the setup of a worker did not end within {_SETUP:g} seconds; look for "
                "what waits in the constructors of your model, data and aggregator, or use "
                "InProcess"
            )
        for connection in connections:
            self._receive(waiting[connection])

    def _receive(self, worker: _Process) -> None:
        """Store an outcome, or replace the worker if it died."""
        try:
            answer = receive(worker.connection)
            _require_answer(answer, worker.calls[0] if worker.is_ready else None)
        except Exception as error:  # the pipe was cut, or the message is invalid
            # Linux reports a reset if the other side closed the pipe with unread data. A worker
            # killed before reading the jobs did not die because of them.
            was_read = not worker.is_gone and not isinstance(error, ConnectionResetError)
            worker.process.kill()
            worker.process.join(_END)
            death = None if worker.timed_out else f"exit code {worker.process.exitcode}"
            self._replace(worker, death, was_read)
            return

        _disarm(worker)
        self._take_answer(worker, answer)
        if worker.timed_out:  # the alarm went off just after it answered
            self._replace(worker, None)

    def _kill(self, worker: _Process) -> None:
        _disarm(worker)
        worker.connection.close()
        worker.process.kill()

    def _close(self, pool: Sequence[_Process]) -> None:
        for worker in pool:
            _disarm(worker)
            worker.connection.close()
        for worker in pool:
            worker.process.join(timeout=1)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(_END)
        if self._payload is not None:
            os.close(self._payload[0])
            self._payload = None


def _require_answer(answer: Any, jobs: Sequence[Job] | None) -> None:
    """Refuse an invalid answer of a worker.

    Args:
        answer: The answer.
        jobs: The jobs of the call. ``None`` stands for the worker's setup.

    Raises:
        TypeError: If it is neither :class:`Fatal` nor one outcome per request of each job, or
            ``None`` after the setup.
    """
    if isinstance(answer, Fatal) or (answer is None and jobs is None):
        return
    if type(answer) is not list or [*map(len, answer)] != [*map(len, jobs or ())]:
        raise TypeError(f"not an answer of a worker: {type(answer).__name__}")
    for outcome in chain.from_iterable(answer):
        if not isinstance(outcome, ClientResult | ClientFailure | OwnScores | None):
            raise TypeError(f"not an outcome: {type(outcome).__name__}")
        for part in (outcome, outcome.update) if isinstance(outcome, ClientResult) else ():
            for field in fields(part):
                getattr(part, field.name)  # raises AttributeError if the field is missing


def _disarm(worker: _Process) -> None:
    if worker.alarm is not None:
        worker.alarm.cancel()
        worker.alarm = None
