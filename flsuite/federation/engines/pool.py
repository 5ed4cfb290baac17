"""Base of engines with a pool of workers: the backlog of jobs, and the workers that take them."""

import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flsuite.common.arguments import Settings
from flsuite.common.errors import FederationError, FlsuiteError, log, one_line
from flsuite.common.messages import (
    Broadcast,
    ClientFailure,
    FitRequest,
    Outcome,
    OwnScores,
    ScoreRequest,
)
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.base import NO_TIMEOUT, Engine, jobs_of
from flsuite.federation.engines.wire import CANNOT_PICKLE, Fatal, Jobs

_AHEAD = 4  # uncollected calls per worker: bounds memory, hides uneven clients
_SCORES_AHEAD = 4  # per worker: bounds the clients' models in memory
_STARTS = 3  # maximum worker deaths in a row during startup

Answer = Outcome | OwnScores | None
"""The answer to a request."""

Job = Sequence[FitRequest | ScoreRequest]
"""A worker's unit of work: a part of the cohort whose models it sums, or one request."""


class _Backlog:
    """Tracks jobs in order: waiting, with a worker, or answered.

    Attributes:
        jobs: The uncollected jobs by the number of each request, in order of submission.
        queued: Number of requests that wait for a worker.
        answers: The uncollected answers by the number of the request.
    """

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self._queue: deque[int] = deque()  # by the number of each job's first request
        self.queued = 0
        self.answers: dict[int, Answer] = {}
        # By the number of a request whose worker died: how often it was the only one.
        self._deaths: dict[int, int] = {}
        self._unread: set[int] = set()  # a worker died before it read them

    def submit(self, jobs: Iterable[Job]) -> None:
        """Append jobs to the queue."""
        for job in jobs:
            self.jobs.update((request.number, job) for request in job)
            self._queue.append(job[0].number)
            self.queued += len(job)

    @property
    def in_hand(self) -> int:
        """Return the number of requests with a worker, or answered but not collected."""
        return len(self.jobs) - self.queued

    @property
    def first(self) -> Job | None:
        """Return the next job to hand out, or ``None``."""
        return self.jobs[self._queue[0]] if self._queue else None

    def broadcasts(self) -> set[int]:
        """Return the identities of the broadcasts that uncollected requests start from."""
        return {id(job[0].broadcast) for job in self.jobs.values()}

    def take(self, most: int) -> list[Job]:
        """Remove jobs of one broadcast from the queue, with about ``most`` clients.

        A job whose worker died is alone.
        """
        jobs: list[Job] = []
        while (job := self.first) is not None:
            if jobs and (
                sum(map(len, [*jobs, job])) > most
                or job[0].broadcast is not jobs[0][0].broadcast
                or self.has_died(job)
                or self.has_died(jobs[0])
            ):
                break
            jobs.append(self.jobs[self._queue.popleft()])
            self.queued -= len(job)
        return jobs

    def move_up(self, number: int) -> None:
        """Move the job of a request to the front of the queue, if it still waits."""
        first = self.jobs[number][0].number
        if first in self._queue:
            self._queue.remove(first)
            self._queue.appendleft(first)

    def answer(self, job: Job, answers: Iterable[Answer]) -> None:
        """Keep the answers of a job until they are collected."""
        for request, answer in zip(job, answers, strict=True):
            self.answers[request.number] = answer

    def bury(self, job: Job, was_alone: bool, was_read: bool = True) -> None:
        """Requeue the requests of a job whose worker died, or fail a request on its second death.

        A worker may die for reasons of the machine, such as memory, so each request is retried
        once, alone on its worker. A death counts only for a request that was alone, because among
        several, the culprit is unknown.

        Args:
            job: The job.
            was_alone: Whether the worker had only this request.
            was_read: Whether the worker has read the job. Otherwise, its death does not count the
                first time. A request that is too large to be read must not be retried forever.
        """
        # In reverse order, because each is put at the front.
        for request in reversed(job):
            number = request.number
            counts = was_alone and (was_read or number in self._unread)
            self._deaths[number] = self._deaths.get(number, 0) + counts
            if self._deaths[number] == 2:
                self.answer([request], [request.failure("its worker died twice")])
                continue
            if not was_read:
                self._unread.add(number)
            self.jobs[number] = [request]
            self._queue.appendleft(number)
            self.queued += 1

    def has_died(self, job: Job) -> bool:
        """Return whether a worker that had this job has died."""
        return job[0].number in self._deaths

    def collect(self, number: int) -> Answer:
        """Return the answer to a request, and forget the request."""
        del self.jobs[number]
        self._deaths.pop(number, None)
        self._unread.discard(number)
        return self.answers.pop(number)


@dataclass(eq=False)
class Worker:
    """A worker as seen by the engine.

    Attributes:
        number: Its place in the pool, which its replacement has too.
        is_ready: Whether its setup is complete.
        calls: Its unanswered calls, oldest first. Each is a list of jobs of one broadcast, answered
            by the list of their outcomes.
    """

    number: int
    is_ready: bool = False
    calls: list[Sequence[Job]] = field(default_factory=list)


class Pool(Engine, Settings):
    """An engine that hands jobs from a backlog to workers.

    Attributes:
        timeout: Seconds that one client's fit may take.
        calls_at_once: Maximum number of unanswered calls per worker.
    """

    timeout: float | None
    calls_at_once = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout is None:
            self.withholds = NO_TIMEOUT
        self._pool: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        """Return to the state before :meth:`start`, in which the engine is plain data."""
        self._setup: WorkerSetup | None = None
        self._backlog = _Backlog()
        self._failed_starts = 0

    def start(self, setup: WorkerSetup) -> None:
        self.stop()
        self._setup = setup
        try:
            for number in range(self._open(setup)):
                self._pool.append(self._spawn(number))
        except BaseException:
            self.stop()
            raise

    def submit(self, requests: Iterable[FitRequest]) -> None:
        assert self._setup is not None
        # With a timeout, a slow client must not take down others, so jobs have one client.
        sums_parts = self._setup.sums_parts and self.timeout is None
        self._backlog.submit(jobs_of(requests, sums_parts, self._setup.stack))
        self._hand_out()

    @property
    def pending(self) -> Sequence[int]:
        return list(self._backlog.jobs)

    def collect(self, number: int) -> Any:
        while number not in self._backlog.answers:
            self._backlog.move_up(number)
            self._hand_out(urgent=number)
            if not self._pool:
                raise FederationError(f"{type(self).__name__}: no worker is left")
            self._wait()
        return self._backlog.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> list[OwnScores | ClientFailure | None]:
        scored: list[Any] = []
        waiting: deque[int] = deque()
        for request in requests:
            self._backlog.submit([[request]])
            self._hand_out()
            waiting.append(request.number)
            if len(waiting) > _SCORES_AHEAD * len(self._pool):
                scored.append(self.collect(waiting.popleft()))
        return [*scored, *map(self.collect, waiting)]

    def stop(self) -> None:
        pool, self._pool = self._pool, []
        self._close(pool)
        self._forget()

    # What an engine does with its kind of workers

    @abstractmethod
    def _open(self, setup: WorkerSetup) -> int:
        """Prepare to start workers, and return their number."""

    @abstractmethod
    def _spawn(self, number: int) -> Any:
        """Return a new :class:`Worker`. Its first answer says that its setup is complete."""

    @abstractmethod
    def _send(self, worker: Any, broadcast: Broadcast, jobs: Jobs) -> None:
        """Send the last one of a worker's calls to it, as jobs without their broadcast."""

    @abstractmethod
    def _wait(self) -> None:
        """Wait until a worker answers, dies or times out, and process it."""

    @abstractmethod
    def _kill(self, worker: Any) -> None:
        """End a worker, which may be dead."""

    @abstractmethod
    def _close(self, pool: Sequence[Any]) -> None:
        """End the workers, and release what :meth:`_open` prepared, if it did."""

    # From requests to calls

    def _hand_out(self, urgent: int | None = None) -> None:
        """Give idle workers their next jobs.

        The job of the urgent request is handed out even if many answers are not collected yet.
        """
        while (first := self._backlog.first) is not None:
            per_call = max(len(first), self._clients_per_call(first[0]))
            workers = max(1, sum(worker.is_ready for worker in self._pool))
            room = _AHEAD * per_call * workers - self._backlog.in_hand
            if room < 1 and all(request.number != urgent for request in first):
                return
            worker = self._free_worker(self._backlog.has_died(first))
            if worker is None:
                return

            # Shorten calls toward the end of the queue, so workers finish together.
            share = -(-self._backlog.queued // (2 * workers))
            jobs = self._backlog.take(min(share, per_call, room))
            worker.calls.append(jobs)
            with self._sendable("a callback or what a client keeps"):
                orders: Any = [[replace(r, broadcast=None) for r in job] for job in jobs]  # type: ignore[arg-type]
                self._send(worker, jobs[0][0].broadcast, orders)

    def _limit(self, request: FitRequest | ScoreRequest) -> float | None:
        """Return the seconds that a worker may take for a request. Scores have no limit."""
        return None if request.is_score else self.timeout

    def _clients_per_call(self, request: FitRequest | ScoreRequest) -> int:
        """Return the number of clients for a call. Results do not depend on it."""
        return 1

    def _free_worker(self, needs_idle: bool) -> Worker | None:
        """Return the worker with the fewest calls, if it can accept one more."""
        most = 1 if needs_idle or self.timeout is not None else self.calls_at_once
        free = [
            worker
            for worker in self._pool
            if worker.is_ready
            and len(worker.calls) < most
            # A suspect of killing a worker runs alone, so no other client is blamed.
            and not any(self._backlog.has_died(jobs[0]) for jobs in worker.calls)
        ]
        return min(free, key=lambda worker: len(worker.calls), default=None)

    @contextmanager
    def _sendable(self, what: str) -> Iterator[None]:
        """Convert pickle errors into an error that says what to change."""
        try:
            yield
        except CANNOT_PICKLE as error:
            raise FlsuiteError(
                f"{type(self).__name__}: {what} cannot be sent to a worker "
                f"({one_line(error, 300)}); create locks, files and connections in a hook, or use "
                "InProcess"
            ) from error

    # From answers to outcomes

    def _take_answer(self, worker: Worker, answer: Any) -> None:
        """Keep the answer to a worker's oldest call. The first answer says that it is ready."""
        if isinstance(answer, Fatal):
            raise answer.error()
        if not worker.is_ready:
            worker.is_ready, self._failed_starts = True, 0
            return
        for job, outcomes in zip(worker.calls.pop(0), answer, strict=True):
            self._backlog.answer(job, outcomes)

    def _replace(self, worker: Worker, death: str | None, was_read: bool = True) -> None:
        """Take back the jobs of a dead worker, and start another one.

        Args:
            worker: The worker. It is unknown which of its jobs it was running.
            death: The cause of its death. ``None`` means a timeout: its clients fail.
            was_read: Whether it has read all of its jobs.

        Raises:
            FederationError: If no worker can be started.
        """
        self._kill(worker)
        self._pool.remove(worker)
        if worker.is_ready:
            self._take_back([job for jobs in worker.calls for job in jobs], death, was_read)
        else:
            self._failed_starts += 1
            log.warning("a worker died while it started (%s)", death)
        if self._failed_starts < _STARTS:
            self._pool.append(self._spawn(worker.number))
        elif not self._pool:
            raise FederationError(
                f"{type(self).__name__}: {_STARTS} workers in a row died while they started; the "
                f"last one: {death}"
            )

    def _take_back(self, jobs: Sequence[Job], death: str | None, was_read: bool) -> None:
        """Requeue the jobs of a dead worker, or fail their clients after a timeout."""
        requests = [request for job in jobs for request in job]
        if not requests:
            return
        names = ", ".join(str(request.client) for request in requests)
        log.warning(
            "round %d: the worker of %s %s %s and is replaced",
            requests[0].broadcast.round,
            "client" if len(requests) == 1 else "clients",
            names,
            "ran out of time" if death is None else f"died ({death})",
        )
        overdue = f"it did not finish within {self.timeout or 0:g} seconds (engine.timeout)"
        for job in reversed(jobs):  # in reverse order: each is put at the front
            if death is None:
                self._backlog.answer(job, [request.failure(overdue) for request in job])
            else:
                self._backlog.bury(job, len(requests) == 1, was_read)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
