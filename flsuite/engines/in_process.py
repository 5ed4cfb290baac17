"""Clients one after another in this process: nothing to start, easy to debug."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from flsuite.client.runner import ClientRunner, WorkerSetup
from flsuite.engines.base import Engine, Outcome
from flsuite.errors import FlsuiteError
from flsuite.messages import FitRequest

__all__ = ["InProcess"]


class InProcess(Engine):
    """Train in this process.

    Args:
        threads: Of torch while a client trains. With 1, weights equal those of :class:`~flsuite.engines.Processes` with one
            thread, bit for bit; large models alone on a machine gain from more.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise FlsuiteError(f"InProcess: threads must be at least 1, got {threads}")
        self.threads = threads

    def start(self, job: WorkerSetup) -> None:
        self._runner = ClientRunner(job)

    def run(self, works: Sequence[FitRequest]) -> Iterator[Outcome]:
        for work in works:
            with _threads(self.threads):
                outcome = self._runner.run(work)
            yield outcome


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
