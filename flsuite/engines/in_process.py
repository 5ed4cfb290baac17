"""Clients one after another in this process, which is easy to debug."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flsuite.arguments import Settings, Threads
from flsuite.client.placement import require_one_gpu
from flsuite.client.runner import ClientRunner
from flsuite.client.setup import WorkerSetup
from flsuite.engines.base import Engine
from flsuite.messages import FitRequest, Outcome

__all__ = ["InProcess"]


@dataclass(eq=False)
class InProcess(Engine, Settings):
    """Trains in this process, each client when its outcome is collected.

    Args:
        threads: Threads of torch while a client trains. With 1, the weights equal those of
            :class:`~flsuite.engines.Processes` with one thread, bit for bit. A large model that has
            the machine to itself is faster with more.
    """

    threads: Threads = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stop()

    def start(self, setup: WorkerSetup) -> None:
        self.stop()
        require_one_gpu(setup.trainer_kwargs)
        self._sums_parts = setup.sums_parts
        self._runner = ClientRunner(setup)

    def submit(self, requests: Iterable[FitRequest]) -> None:
        for job in self.jobs(requests, self._sums_parts):
            self._jobs.update((request.number, job) for request in job)

    @property
    def pending(self) -> Sequence[int]:
        return list(self._jobs)

    def collect(self, number: int) -> Outcome:
        job = self._jobs.pop(number)
        if number not in self._outcomes:
            # Sums depend on the number of threads, so it is set here and not left to torch.
            with _threads(self.threads):
                outcomes = self._runner.run_job(job)
            self._outcomes.update(zip((r.number for r in job), outcomes, strict=True))
        return self._outcomes.pop(number)

    def stop(self) -> None:
        self._jobs: dict[int, list[FitRequest]] = {}
        self._outcomes: dict[int, Outcome] = {}


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it at the end."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
