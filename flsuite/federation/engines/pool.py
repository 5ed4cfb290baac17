"""Base of engines with a pool of workers: the backlog of jobs, and the loop over it."""

import logging
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.messages import (
    Broadcast,
    ClientFailure,
    Fault,
    FitRequest,
    Outcome,
    OwnScores,
    ScoreRequest,
)
from flsuite.federation.engines.base import Engine, EngineDeclarations, jobs_of
from flsuite.federation.engines.wire import CANNOT_PICKLE

log = logging.getLogger("flsuite")

_SCORES_AHEAD = 4  # per worker: bounds the clients' models in memory

Request = FitRequest | ScoreRequest

Answer = Outcome | OwnScores | None
"""The answer to a request."""

Job = Sequence[Request]
"""A worker's unit of work: a part of the cohort whose models it sums, or one request."""


class Backlog:
    """Tracks jobs in order: waiting, with a worker, or answered.

    Attributes:
        queued: Number of requests that wait for a worker.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}  # by the number of each request
        self._queue: deque[int] = deque()  # by the number of each job's first request
        self.queued = 0
        self._answers: dict[int, Answer] = {}
        self._suspects: set[int] = set()  # a worker that had them died
        self._deaths: set[int] = set()  # a worker with only this request died
        self._unread: set[int] = set()  # a worker died before it read them

    def submit(self, jobs: Iterable[Job]) -> None:
        """Append jobs to the queue."""
        for job in jobs:
            self._jobs.update((request.number, job) for request in job)
            self._queue.append(job[0].number)
            self.queued += len(job)

    @property
    def pending(self) -> Sequence[int]:
        """Return the numbers of the uncollected requests, in order of submission."""
        return list(self._jobs)

    @property
    def in_hand(self) -> int:
        """Return the number of requests with a worker, or answered but not collected."""
        return len(self._jobs) - self.queued

    @property
    def first(self) -> Job | None:
        """Return the next job to hand out, or ``None``."""
        return self._jobs[self._queue[0]] if self._queue else None

    def broadcasts(self) -> list[Broadcast]:
        """Return the broadcasts that uncollected requests start from."""
        jobs = self._jobs.values()
        return list({id(job[0].broadcast): job[0].broadcast for job in jobs}.values())

    def take(self) -> Job:
        """Remove the first job from the queue, and return it."""
        job = self._jobs[self._queue.popleft()]
        self.queued -= len(job)
        return job

    def move_up(self, number: int) -> None:
        """Move the job of a request to the front of the queue, if it still waits."""
        first = self._jobs[number][0].number
        if first in self._queue:
            self._queue.remove(first)
            self._queue.appendleft(first)

    def answer(self, job: Job, answers: Iterable[Answer]) -> None:
        """Keep the answers of a job until they are collected."""
        for request, answer in zip(job, answers, strict=True):
            self._answers[request.number] = answer

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
            counts = was_alone and (was_read or request.number in self._unread)
            if counts and request.number in self._deaths:
                self.answer([request], [request.failure("its worker died twice")])
                continue
            self._suspects.add(request.number)
            self._deaths.update([request.number] if counts else [])
            self._unread.update([] if was_read else [request.number])
            self._jobs[request.number] = [request]
            self._queue.appendleft(request.number)
            self.queued += 1

    def has_died(self, job: Job) -> bool:
        """Return whether a worker that had this job has died."""
        return job[0].number in self._suspects

    def has_answer(self, number: int) -> bool:
        """Return whether a request has an answer."""
        return number in self._answers

    def collect(self, number: int) -> Answer:
        """Return the answer to a request, and forget the request."""
        del self._jobs[number]
        for fates in (self._deaths, self._suspects, self._unread):
            fates.discard(number)
        return self._answers.pop(number)


class Pool(Engine):
    """An engine that hands jobs from a backlog to workers.

    Attributes:
        timeout: Seconds that one client's fit may take.
    """

    timeout: float | None
    _backlog: Backlog
    _sums_parts: bool
    _clients: int

    @property
    def declarations(self) -> EngineDeclarations:
        declared = super().declarations
        lost: set[Fault] = {"dies"} if self.timeout is None else {"dies", "hangs"}
        return replace(declared, survives=declared.survives | lost)

    def submit(self, requests: Iterable[FitRequest]) -> None:
        # With a timeout, a slow client must not take down others, so jobs have one client.
        self._backlog.submit(
            jobs_of(requests, self._sums_parts and self.timeout is None, self._clients)
        )
        self._hand_out()

    @property
    def pending(self) -> Sequence[int]:
        return self._backlog.pending

    def collect(self, number: int) -> Any:
        while not self._backlog.has_answer(number):
            self._backlog.move_up(number)
            self._hand_out(urgent=number)
            self._wait()
        return self._backlog.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> list[OwnScores | ClientFailure | None]:
        scored: list[Any] = []
        waiting: deque[int] = deque()
        for request in requests:
            self._backlog.submit([[request]])
            self._hand_out()
            waiting.append(request.number)
            if len(waiting) > _SCORES_AHEAD * self._workers():
                scored.append(self.collect(waiting.popleft()))
        return [*scored, *map(self.collect, waiting)]

    @abstractmethod
    def _workers(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    def _hand_out(self, urgent: int | None = None) -> None:
        """Give idle workers their next jobs.

        The job of the urgent request is handed out even if many answers are not collected yet.
        """

    @abstractmethod
    def _wait(self) -> None:
        """Wait until a worker answers or dies, and process it."""

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

    def _take_back(self, jobs: Sequence[Job], death: str | None, was_read: bool = True) -> None:
        """Take back the jobs of a worker that is replaced.

        Args:
            jobs: The jobs. It is unknown which of them the worker was running.
            death: The cause of its death. ``None`` means a timeout: its clients fail.
            was_read: Whether the worker has read all of them.
        """
        requests = [request for job in jobs for request in job]
        log.warning(
            "round %d: the worker of %s %s and is replaced",
            requests[0].broadcast.round if requests else 0,
            _named(requests),
            "ran out of time" if death is None else f"died ({death})",
        )
        overdue = f"it did not finish within {self.timeout or 0:g} seconds (engine.timeout)"
        for job in reversed(jobs):  # in reverse order: each is put at the front
            if death is None:
                self._backlog.answer(job, [request.failure(overdue) for request in job])
            else:
                self._backlog.bury(job, len(requests) == 1, was_read)


def without_broadcast(job: Job) -> list[Request]:
    """Return the requests without their broadcast. The worker adds its copy."""
    return [replace(request, broadcast=None) for request in job]  # type: ignore[arg-type]


def _named(requests: Sequence[Request]) -> str:
    """Return the clients of requests as text for the log."""
    names = [str(request.client) for request in requests]
    return f"client {names[0]}" if len(names) == 1 else f"clients {', '.join(names) or 'none'}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
