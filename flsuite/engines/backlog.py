"""The requests of an engine with workers, from their submission to their collection."""

from collections import deque
from collections.abc import Iterable, Sequence

from flsuite.messages import Broadcast, FitRequest, Outcome

__all__ = ["Backlog"]


class Backlog:
    """Keeps requests in order: those that wait, are with a worker, or have an outcome."""

    def __init__(self) -> None:
        self._pending: dict[int, FitRequest] = {}
        self._queue: deque[int] = deque()
        self._outcomes: dict[int, Outcome] = {}
        self._deaths: set[int] = set()

    def submit(self, requests: Iterable[FitRequest]) -> None:
        """Append requests to the queue."""
        for request in requests:
            self._pending[request.number] = request
            self._queue.append(request.number)

    @property
    def pending(self) -> Sequence[int]:
        """Return the numbers of the uncollected requests, in the order of submission."""
        return list(self._pending)

    @property
    def queued(self) -> int:
        """Return how many requests wait for a worker."""
        return len(self._queue)

    @property
    def in_hand(self) -> int:
        """Return how many requests are training, or trained and not collected."""
        return len(self._pending) - len(self._queue)

    @property
    def first(self) -> FitRequest | None:
        """Return the request that is handed out next, or ``None``."""
        return self._pending[self._queue[0]] if self._queue else None

    def broadcasts(self) -> list[Broadcast]:
        """Return the broadcasts that uncollected requests start from."""
        return list({id(r.broadcast): r.broadcast for r in self._pending.values()}.values())

    def take(self) -> FitRequest:
        """Remove the first request from the queue, and return it."""
        return self._pending[self._queue.popleft()]

    def move_up(self, number: int) -> None:
        """Put a request first in the queue, if it still waits."""
        if number in self._queue:
            self._queue.remove(number)
            self._queue.appendleft(number)

    def answer(self, request: FitRequest, outcome: Outcome) -> None:
        """Keep an outcome until it is collected."""
        self._outcomes[request.number] = outcome

    def bury(self, request: FitRequest, worker: str = "worker") -> None:
        """Put back a request whose worker died, or let it fail the second time.

        A worker may die for a reason of the machine, such as memory, so that one more try is worth
        it.
        """
        if request.number in self._deaths:
            self.answer(request, request.failure(f"its {worker} died twice"))
            return
        self._deaths.add(request.number)
        self._queue.appendleft(request.number)

    def has_died(self, request: FitRequest) -> bool:
        """Return whether a worker that had this request has died."""
        return request.number in self._deaths

    def has_outcome(self, number: int) -> bool:
        """Return whether a request can be collected."""
        return number in self._outcomes

    def collect(self, number: int) -> Outcome:
        """Return an outcome, and forget its request."""
        del self._pending[number]
        self._deaths.discard(number)
        return self._outcomes.pop(number)
