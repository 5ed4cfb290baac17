"""The interface of engines, and the engine that trains clients in this process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch

from flsuite.aggregators.part import Capability
from flsuite.common.arguments import Settings, Threads
from flsuite.common.messages import ClientFailure, FitRequest, Outcome, OwnScores, ScoreRequest
from flsuite.federation.client.devices import require_one_gpu
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.client.setup import WorkerSetup

NO_WORKERS: Mapping[Capability, str] = {
    "worker processes": "has none; set trainer.engine to Processes, or trainer.schedule.dies to 0"
}
NO_TIMEOUT: Mapping[Capability, str] = {
    "a timeout of fits": "has none; set trainer.engine to Processes(timeout=...), which replaces "
    "the worker of a client that hangs, or trainer.schedule.hangs to 0"
}


class EngineChoice(ABC):  # noqa: B024  (it has the declarations)
    """What ``trainer.engine`` can name: an engine, or a way to choose one.

    Attributes:
        needs: What it requires of the other parts of a run, see :class:`flsuite.aggregators.Part`.
        withholds: What it denies to them, each with the reason.
        decides: Names of the arguments that affect the rounding of results, which are settings of
            the record.
    """

    needs: Collection[Capability] = ()
    withholds: Mapping[Capability, str] = {}
    decides: tuple[str, ...] = ()


class Engine(EngineChoice):
    """Determines where clients train.

    The engine does not affect results. The same requests give the same outcomes on every engine, in
    any order of collection.
    """

    @abstractmethod
    def start(self, setup: WorkerSetup) -> None:
        """Prepare to train the clients of this run."""

    @abstractmethod
    def submit(self, requests: Iterable[FitRequest]) -> None:
        """Queue fits. They may train ahead of their collection, within bounded memory."""

    def join(self, awaited: Callable[[], Collection[int]]) -> None:
        """Let fits train together, which affects the rounding of their results.

        A fit trains with the others that are pending when its outcome is needed. A call replaces
        the earlier one, and drops outcomes that are not collected.

        Args:
            awaited: Returns the numbers of the fits. An engine without stacks does not call it.
        """
        return

    @property
    @abstractmethod
    def pending(self) -> Sequence[int]:
        """Return the numbers of the uncollected requests, in order of submission."""

    @abstractmethod
    def collect(self, number: int) -> Outcome:
        """Wait for the outcome of one pending request, and forget the request.

        Raises:
            FlsuiteError: If no client can train with the settings of the run.
        """

    def score(
        self, requests: Iterable[ScoreRequest]
    ) -> list[OwnScores | ClientFailure | None] | None:
        """Score clients' own models in parallel, and return their scores in this order.

        A client has ``None`` if there is no such split. Pending fits stay pending.

        Returns:
            ``None`` if the engine has no other processes. The caller then scores them itself.
        """
        return None

    def stop(self) -> None:
        """Release the resources of :meth:`start`, and drop pending requests.

        May be called twice.
        """
        return


@dataclass(eq=False)
class InProcess(Engine, Settings):
    """Trains in this process, each client when its outcome is collected.

    Take it for small runs, for debugging and in sweeps: it is the default.

    Args:
        threads: torch threads for training. With 1, the weights equal those of
            ``Processes`` with one thread, bit for bit. A large model that has the machine to itself
            trains faster with more threads.
    """

    threads: Threads = 1

    withholds = {**NO_WORKERS, **NO_TIMEOUT}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stop()

    def start(self, setup: WorkerSetup) -> None:
        self.stop()
        require_one_gpu(setup.trainer_kwargs)
        self._setup, self._runner = setup, JobRunner(setup)

    def submit(self, requests: Iterable[FitRequest]) -> None:
        for job in jobs_of(requests, self._setup.sums_parts, self._setup.stack):
            self._jobs.update((request.number, job) for request in job)

    def join(self, awaited: Callable[[], Collection[int]]) -> None:
        if self._setup.stack > 1:
            self._together = frozenset(awaited())
            self._outcomes.clear()

    @property
    def pending(self) -> Sequence[int]:
        return list(self._jobs)

    def collect(self, number: int) -> Outcome:
        if number not in self._outcomes:
            job = self._joined(number) if number in self._together else self._jobs[number]
            # Sums depend on the number of threads, so it is set here instead of by torch.
            with threads_set(self.threads):
                outcomes = self._runner.answer(job)
            self._outcomes.update(zip((r.number for r in job), outcomes, strict=True))
        del self._jobs[number]
        return self._outcomes.pop(number)

    def _joined(self, number: int) -> list[FitRequest]:
        """Return the pending fits that train together with one of them."""
        waiting = self._jobs.keys() & self._together - self._outcomes.keys()
        return [request for n in sorted(waiting) for request in self._jobs[n]]

    def stop(self) -> None:
        self._together = frozenset[int]()
        self._jobs: dict[int, list[FitRequest]] = {}
        self._outcomes: dict[int, Outcome] = {}


def jobs_of(
    requests: Iterable[FitRequest], sums_parts: bool, stack: int = 1
) -> Iterator[list[FitRequest]]:
    """Yield the jobs of workers: a part of the cohort, or one client, or as many as a stack has.

    Args:
        requests: The requests. Requests of one part are adjacent.
        sums_parts: Whether a worker should sum the models of a part.
        stack: Clients that a worker trains at the same time.
    """
    job: list[FitRequest] = []
    for unit in _units_of(requests, sums_parts):
        if job and (not _are_alike(job[0], unit[0]) or len(job) + len(unit) > stack):
            yield job
            job = []
        job += unit
    if job:
        yield job


def _are_alike(first: FitRequest, other: FitRequest) -> bool:
    """Return whether two fits may be in one job, which has one broadcast that is sent once."""
    # Fits without a round come back one by one, so that only the schedule knows which may join.
    has_round = other.part is not None or other.adapts > 0
    return has_round and first.adapts == other.adapts and first.broadcast is other.broadcast


def _units_of(requests: Iterable[FitRequest], sums_parts: bool) -> Iterator[list[FitRequest]]:
    """Yield what one worker must train: a part of the cohort, or one client."""
    for part, members in groupby(requests, key=lambda request: request.part):
        if sums_parts and part is not None:
            yield list(members)
        else:
            yield from ([request] for request in members)


@contextmanager
def threads_set(number: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it on exit."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
