"""Engine with persistent worker processes: one import, model and Trainer per worker."""

import multiprocessing
import os
import threading
from dataclasses import dataclass, fields
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from operator import methodcaller
from typing import Any

from flsuite.common.arguments import PositiveFloat, PositiveInt, Settings, Threads
from flsuite.common.errors import FederationError
from flsuite.common.messages import Broadcast, ClientFailure, ClientResult, OwnScores, ScoreRequest
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.forkserver import (
    prepare_workers,
    prepare_workers_early,
    without_main,
)
from flsuite.federation.engines.pool import Backlog, Job, Pool, cores, without_broadcast
from flsuite.federation.engines.wire import (
    Fatal,
    Ready,
    dump_shared,
    dump_without_data,
    receive,
    send,
    serve,
)

_AHEAD = 4  # uncollected outcomes per worker: bounds memory, hides uneven clients
_SETUP = 600.0  # maximum seconds of a worker's setup, which takes a few
_END = 5.0  # maximum seconds until a killed process has ended


@dataclass
class _Worker:
    """A worker process as seen by the engine.

    Attributes:
        job: The requests that it is working on.
        broadcast: The last broadcast sent to it.
        is_ready: Whether its setup is complete. A fit's time counts from then.
        alarm: Kills it when its setup or its fit takes too long.
        timed_out: Whether the alarm went off.
        is_gone: Whether its last job could not be sent to it.
    """

    process: Any
    connection: Connection
    job: Job = ()
    broadcast: Broadcast | None = None
    is_ready: bool = False
    alarm: threading.Timer | None = None
    timed_out: bool = False
    is_gone: bool = False


@dataclass(eq=False)
class Processes(Pool, Settings):
    """Trains in worker processes.

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
        self._pool: list[_Worker] = []
        self._payload: tuple[int, bytes, list[tuple[int, int]]] | None = None
        self._backlog = Backlog()
        prepare_workers_early()

    def start(self, setup: WorkerSetup) -> None:
        self.stop()
        prepare_workers()
        self._sums_parts, self._clients = setup.sums_parts, setup.stack
        with self._sendable("the model, the aggregator or the data"):
            descriptor, head, places = dump_shared((setup.data, dump_without_data(setup)))
        self._payload = (descriptor, bytes(head), places)
        self._pool = [self._spawn(worker) for worker in range(self.workers or cores())]

    def stop(self) -> None:
        for worker in self._pool:
            _disarm(worker)
            worker.connection.close()
        for worker in self._pool:
            worker.process.join(timeout=1)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(_END)

        self._pool = []
        self._backlog = Backlog()
        if self._payload is not None:
            os.close(self._payload[0])
            self._payload = None

    def _workers(self) -> int:
        return len(self._pool)

    def _wait(self) -> None:
        busy: dict[Any, _Worker] = {w.connection: w for w in self._pool if w.job}
        # Without a limit, because a fit takes as long as it does. A worker's alarm ends the wait.
        for connection in wait(list(busy)):
            self._take_answer(busy[connection])

    def _hand_out(self, urgent: int | None = None) -> None:
        for position, worker in enumerate(self._pool):
            job = self._backlog.first
            if job is None:
                return
            is_full = self._backlog.in_hand >= _AHEAD * len(self._pool) * len(job)
            if is_full and all(request.number != urgent for request in job):
                return
            if not worker.job:
                if not worker.process.is_alive():
                    worker = self._replace(position)
                self._assign(worker, self._backlog.take())

    def _assign(self, worker: _Worker, job: Job) -> None:
        worker.job = job
        self._arm(worker)  # before sending, because a worker that hangs does not receive
        broadcast = job[0].broadcast
        try:
            with self._sendable("a callback or what a client keeps"):
                # Once per round and worker, because the global model dominates the traffic.
                if worker.broadcast is not broadcast:
                    send(worker.connection, broadcast)
                    worker.broadcast = broadcast
                send(worker.connection, without_broadcast(job))
        except OSError:  # it just died, which its connection will show
            worker.is_gone = True

    def _arm(self, worker: _Worker) -> None:
        """Start an alarm that kills the worker unless it answers in time, even if it hangs."""
        _disarm(worker)
        limit = None if isinstance(worker.job[0], ScoreRequest) else self.timeout
        seconds = limit if worker.is_ready else _SETUP
        if seconds is None:
            return

        def kill() -> None:
            worker.timed_out = True
            worker.process.kill()

        worker.alarm = threading.Timer(seconds, kill)
        worker.alarm.daemon = True
        worker.alarm.start()

    def _take_answer(self, worker: _Worker) -> None:
        """Store an outcome, or replace the worker if it died."""
        job = worker.job
        try:
            answer = receive(worker.connection)
            _require_answer(answer, job)
        except Exception as error:  # the pipe was cut, or the message is invalid
            # Linux reports this if the other side closed the pipe with unread data.
            worker.is_gone |= isinstance(error, ConnectionResetError)
            worker.process.kill()
            self._take_death(worker)
            return
        if isinstance(answer, Ready):
            worker.is_ready = True
            self._arm(worker)
            return

        _disarm(worker)
        if isinstance(answer, Fatal):
            raise answer.error()
        worker.job = ()
        self._backlog.answer(job, answer)
        if worker.timed_out:  # the alarm went off just after it answered
            self._replace(self._pool.index(worker))

    def _take_death(self, worker: _Worker) -> None:
        _disarm(worker)
        worker.process.join(_END)
        if worker.timed_out and not worker.is_ready:
            raise FederationError(
                f"Processes: the setup of a worker did not end within {_SETUP:g} seconds; look for "
                "what waits in the constructors of your model, data and aggregator, or use "
                "InProcess"
            )
        death = None if worker.timed_out else f"exit code {worker.process.exitcode}"
        # A worker killed before reading the job did not die because of it.
        self._take_back([worker.job], death, was_read=not worker.is_gone)
        self._replace(self._pool.index(worker))

    def _replace(self, position: int) -> _Worker:
        self._pool[position].connection.close()
        self._pool[position] = self._spawn(position)
        return self._pool[position]

    def _spawn(self, position: int) -> _Worker:
        assert self._payload is not None
        descriptor, head, places = self._payload
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        arguments = (theirs, _Descriptor(descriptor), head, places, self.threads, position)

        process = context.Process(target=serve, args=arguments, daemon=True)
        with without_main():
            # It waits for the server without a limit. The server imports flsuite only.
            process.start()
        # Leave this end open only in the worker, so its death closes the connection.
        theirs.close()
        return _Worker(process, ours)


class _Descriptor:
    """A file descriptor that can be pickled. It arrives open, with a new number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return methodcaller("detach"), (reduction.DupFd(self.number),)


def _require_answer(answer: Any, job: Job) -> None:
    """Refuse an invalid answer of a worker.

    Raises:
        TypeError: If it is neither a signal of the worker nor one outcome per request.
    """
    if isinstance(answer, Ready | Fatal):
        return
    kinds = (ClientResult, ClientFailure, OwnScores, type(None))
    is_whole = isinstance(answer, list) and len(answer) == len(job)
    if not is_whole or not all(isinstance(outcome, kinds) for outcome in answer):
        raise TypeError(f"not an answer of a worker: {type(answer).__name__}")
    for outcome in answer:
        for part in (outcome, outcome.update) if isinstance(outcome, ClientResult) else ():
            for field in fields(part):
                getattr(part, field.name)  # raises AttributeError if the field is missing


def _disarm(worker: _Worker) -> None:
    if worker.alarm is not None:
        worker.alarm.cancel()
        worker.alarm = None
