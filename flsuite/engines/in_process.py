"""Clients one after another in this process, which is easy to debug."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from flsuite.client.runner import ClientRunner
from flsuite.client.setup import WorkerSetup
from flsuite.engines.base import Engine
from flsuite.errors import require_at_least
from flsuite.messages import FitRequest, Outcome

__all__ = ["InProcess"]


class InProcess(Engine):
    """Trains in this process, each client when its outcome is collected.

    Args:
        threads: Threads of torch while a client trains. With 1, the weights equal those of
            :class:`~flsuite.engines.Processes` with one thread, bit for bit. A large model that has
            the machine to itself is faster with more.
    """

    def __init__(self, threads: int = 1) -> None:
        require_at_least("InProcess", 1, threads=threads)
        self.threads = threads
        self._requests: dict[int, FitRequest] = {}

    def start(self, setup: WorkerSetup) -> None:
        self._requests = {}
        self._runner = ClientRunner(setup)

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._requests.update((request.number, request) for request in requests)

    @property
    def pending(self) -> Sequence[int]:
        return list(self._requests)

    def collect(self, number: int) -> Outcome:
        # Sums depend on the number of threads, so it is set here and not left to torch.
        with _threads(self.threads):
            return self._runner.run(self._requests.pop(number))

    def stop(self) -> None:
        self._requests = {}


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
