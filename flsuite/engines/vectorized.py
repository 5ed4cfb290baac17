"""The engine that trains many clients as one batched program."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from flsuite.arguments import PositiveInt
from flsuite.client.setup import WorkerSetup
from flsuite.client.stack import Stack
from flsuite.client.stackable import can_stack, require_stackable
from flsuite.engines.base import InProcess, threads_set
from flsuite.errors import FlsuiteError, one_line
from flsuite.messages import FitRequest, Outcome

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Vectorized(InProcess):
    """Trains clients in stacks: their weights lie along a first axis, and one program steps all.

    Small networks train several times as fast as one after another, because a step of the whole
    stack launches as many operations as a step of one client. Each client takes the same steps on
    the same batches as on other engines. Batched kernels round differently, so the weights differ
    from other engines' in the last digits, and a run goes on with the stacks that it began with.

    It takes models with one of torch's elementwise optimizers, and algorithms that see no more of a
    client's steps than gradients, such as FedProx and SCAFFOLD. It refuses others before the first
    round. Attackers train one by one. A step's ``batch_idx`` counts over the whole fit, and what a
    model logs is its mean over the last epoch.

    Args:
        threads: torch threads for training.
        clients: Clients per stack.
    """

    decides = True

    clients: PositiveInt = 64

    def start(self, setup: WorkerSetup) -> None:
        require_stackable(setup)
        super().start(setup)
        self._stack, self._level = Stack(self._runner), logging.WARNING

    def submit(self, requests: Iterable[FitRequest]) -> None:
        requests = list(requests)
        super().submit(requests)
        able = [r for r in requests if can_stack(self._runner.setup, r)]
        for _, alike in groupby(able, key=lambda r: (r.broadcast.round, r.adapts)):
            members = list(alike)
            for first in range(0, len(members), self.clients):
                stack = members[first : first + self.clients]
                # A stack of one would only be slower.
                if len(stack) > 1:
                    self._waiting.update((request.number, stack) for request in stack)

    def collect(self, number: int) -> Outcome:
        for request in self._jobs.get(number, ()):
            self._train(request.number)
        outcome = super().collect(number)
        self._runner.stacked.pop(number, None)
        return outcome

    def stop(self) -> None:
        super().stop()
        self._waiting: dict[int, list[FitRequest]] = {}

    def _train(self, number: int) -> None:
        """Train the stack of a fit, unless it has been."""
        stack = self._waiting.get(number, [])
        for request in stack:
            del self._waiting[request.number]
        if not stack:
            return
        try:
            with threads_set(self.threads):
                self._runner.stacked.update(self._stack.train(stack))
        except FlsuiteError:
            raise
        except Exception as error:
            # Which client it is shows when each trains by itself.
            level, self._level = self._level, logging.DEBUG  # said once
            log.log(
                level,
                "a stack of %d clients could not train, so each trains by itself (%s: %s)",
                len(stack),
                type(error).__name__,
                one_line(error, longest=160),
            )
