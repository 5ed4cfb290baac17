"""Clients in persistent worker processes: one import, one model and one Trainer a worker, for the whole run."""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from flsuite.client.runner import WorkerSetup
from flsuite.engines.base import Engine, Outcome
from flsuite.engines.forkserver import prepare_workers, without_main
from flsuite.engines.wire import dump_shared, dumps, receive, send
from flsuite.engines.worker import serve
from flsuite.errors import FlsuiteError
from flsuite.messages import ClientFailure, FitRequest

__all__ = ["Processes"]

log = logging.getLogger("flsuite")
_AHEAD = 4  # works per worker that may be finished before their turn: bounds memory, hides uneven clients


@dataclass
class _Worker:
    process: Any
    connection: Connection
    index: int | None = None
    round: int | None = None


class Processes(Engine):
    """Train in worker processes.

    Workers are forked from a server process that has imported everything and computed nothing, so that starting or replacing
    one takes milliseconds. The dataset lies in memory once. A worker that dies is replaced and its client tried once more.

    Args:
        workers: How many; default: the cores this process may use.
        threads: Of torch in each of them.
    """

    def __init__(self, workers: int | None = None, threads: int = 1) -> None:
        if workers is not None and workers < 1:
            raise FlsuiteError(f"Processes: workers must be at least 1, got {workers}")
        if threads < 1:
            raise FlsuiteError(f"Processes: threads must be at least 1, got {threads}")
        self.workers = workers
        self.threads = threads
        self._pool: list[_Worker] = []
        self._payload: tuple[int, bytes, list[tuple[int, int]]] | None = None

    def start(self, job: WorkerSetup) -> None:
        self.stop()
        prepare_workers()
        rest = {
            f.name: getattr(job, f.name) for f in fields(job) if f.name not in ("model", "data")
        }
        descriptor, head, places = dump_shared((job.data, bytes(dumps((job.model, rest)))))
        self._payload = (descriptor, bytes(head), places)
        self._pool = [self._spawn() for _ in range(self.workers or _cores())]

    def stop(self) -> None:
        for worker in self._pool:
            worker.connection.close()
        for worker in self._pool:
            worker.process.join(timeout=1)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._pool = []
        if self._payload is not None:
            os.close(self._payload[0])
            self._payload = None

    def run(self, works: Sequence[FitRequest]) -> Iterator[Outcome]:
        waiting = deque(range(len(works)))
        tried: set[int] = set()
        done: dict[int, Outcome] = {}
        turn = 0
        while turn < len(works):
            self._hand_out(works, waiting, turn)
            for worker in self._ready():
                index = worker.index
                assert index is not None
                outcome = self._collect(worker)
                if outcome is not None:
                    done[index] = outcome
                elif index not in tried:
                    tried.add(index)
                    waiting.appendleft(index)
                else:
                    work = works[index]
                    done[index] = ClientFailure(
                        work.task.client, work.broadcast.round, "its worker process died twice"
                    )
            while turn in done:
                yield done.pop(turn)
                turn += 1

    def _hand_out(self, works: Sequence[FitRequest], waiting: "deque[int]", turn: int) -> None:
        for position, worker in enumerate(self._pool):
            if not waiting or waiting[0] >= turn + _AHEAD * len(self._pool):
                return
            if worker.index is not None:
                continue
            if not worker.process.is_alive():
                worker = self._replace(position)
            index = waiting.popleft()
            worker.index = index
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it died just now; collecting from it will tell
                self._submit(worker, works[index])

    @staticmethod
    def _submit(worker: _Worker, work: FitRequest) -> None:
        if worker.round != work.broadcast.round:
            send(worker.connection, work.broadcast)
            worker.round = work.broadcast.round
        send(worker.connection, (work.task, work.memory))

    def _ready(self) -> list[_Worker]:
        busy = {worker.connection: worker for worker in self._pool if worker.index is not None}
        return [
            busy[connection]
            for connection in wait(list(busy))
            if isinstance(connection, Connection)
        ]

    def _collect(self, worker: _Worker) -> Outcome | None:
        """What the worker sent; ``None``, and another worker in its place, if it died."""
        try:
            answer = receive(worker.connection)
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=5)
            log.warning(
                "a worker process died (exit code %s) and was replaced", worker.process.exitcode
            )
            self._replace(self._pool.index(worker))
            return None
        if isinstance(answer, tuple):
            _, message, is_user_error = answer
            raise (
                FlsuiteError(message)
                if is_user_error
                else RuntimeError(f"a worker process failed:\n{message}")
            )
        worker.index = None
        return answer

    def _replace(self, position: int) -> _Worker:
        self._pool[position].connection.close()
        self._pool[position] = self._spawn()
        return self._pool[position]

    def _spawn(self) -> _Worker:
        assert self._payload is not None
        descriptor, head, places = self._payload
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(theirs, _Descriptor(descriptor), head, places, self.threads),
            daemon=True,
        )
        with without_main():
            process.start()
        theirs.close()
        return _Worker(process, ours)


class _Descriptor:
    """A file descriptor that arrives open, as its number there, in the process that it is sent to."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self.number),)


def _detach(duplicate: Any) -> int:
    return duplicate.detach()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
