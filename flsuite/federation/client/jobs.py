"""Answers the jobs of a worker: fits, whose models it may sum up, and scores."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from flsuite.common.messages import (
    ClientResult,
    ClientUpdate,
    FitRequest,
    Outcome,
    ScoreRequest,
    replaced,
)
from flsuite.common.state import Sums, Tree, clone, moved
from flsuite.federation.client.runner import ClientRunner
from flsuite.federation.client.setup import WorkerSetup


class JobRunner:
    """Runs the jobs of one worker.

    Args:
        setup: The setup shared by all workers.
        worker: Number of the worker, which determines its GPU if there are several.
    """

    def __init__(self, setup: WorkerSetup, worker: int = 0) -> None:
        self._setup, self._runner = setup, ClientRunner(setup, worker)

    def answer(self, job: Sequence[FitRequest | ScoreRequest]) -> list[Any]:
        """Return the answers to the requests of a job, which are all of one kind.

        The models of a part of the cohort are summed. A faulty update keeps its model and is
        excluded from the sum, so the server can refuse it by name. The model of a single client is
        sent unchanged.
        """
        fits = [request for request in job if not request.is_score]
        if not fits:
            return [self._runner.score(r) for r in job if r.is_score]
        fits = self._runner.trained_together(fits)
        outcomes: list[Outcome] = []
        for part, members in groupby(fits, key=self._part_of):
            requests = list(members)
            if self._setup.sums_parts and part is not None and len(requests) > 1:
                outcomes += self._part(requests)
                continue
            for request in requests:
                outcome = self._runner.run(request)
                if not outcome.failed:
                    outcome.update.state = clone(outcome.update.state)
                outcomes.append(outcome)
        return outcomes

    def _part_of(self, request: FitRequest) -> int | None:
        """Return the part of the cohort that is summed with a fit. Stacks are summed as a whole."""
        is_stacked = self._setup.stack > 1 and request.part is not None
        return 0 if is_stacked else request.part

    def _part(self, fits: Sequence[FitRequest]) -> list[Outcome]:
        """Return the outcomes of a part of the cohort, the last of them with the sum."""
        # NaN and infinity propagate to the sum, so checking the sum is enough. If it fails, run the
        # same fits again to find the client.
        outcomes, total = self._sum_up(fits, reads_numbers=False)
        return outcomes if total.is_finite else self._sum_up(fits, reads_numbers=True)[0]

    def _sum_up(
        self, requests: Sequence[FitRequest], reads_numbers: bool
    ) -> tuple[list[Outcome], Sums]:
        """Train several clients, and return their outcomes and the sum of the models.

        Args:
            requests: The fits.
            reads_numbers: Whether to exclude models with non-finite numbers.
        """
        total, outcomes = Sums(), []
        last: ClientUpdate | None = None
        stacked: list[Tree] = []  # contributions of models that no later fit overwrites
        for request in requests:
            outcome = self._runner.run(request)
            if not outcome.failed:
                update = outcome.update
                is_late = request.fault == "late"  # excluded from its part's sum
                if not is_late and (read := self._readable(outcome, request, reads_numbers)):
                    trained, own = request.trained, self._contribution(read)
                    stacked.append(own) if trained and not trained.measures else total.add(own)
                    update.state, update.extras, update.partial, last = {}, {}, Sums(), update
                else:
                    update.state = clone(update.state)
            outcomes.append(outcome)

        total.add_all(stacked)
        if last is not None:
            last.partial = total
        return outcomes, total

    def _contribution(self, update: ClientUpdate) -> Tree:
        """Return what a client adds to the sums, on the device of its model."""
        device = next((value.device for value in update.state.values()), torch.device("cpu"))
        contribution = self._setup.uplink.contribution
        if device.type == "cpu":
            return contribution(update)
        counts, extras = update.class_counts.to(device), moved(update.extras, device)
        try:
            return contribution(replaced(update, class_counts=counts, extras=extras))
        except (RuntimeError, TypeError):
            # A rule of the user may have tensors of its own on the CPU, or use NumPy.
            return contribution(replaced(update, state=clone(update.state)))

    def _readable(
        self, outcome: ClientResult, request: FitRequest, reads_numbers: bool
    ) -> ClientUpdate | None:
        """Return an update as the server reads it, or ``None`` if the server will refuse it."""
        base, received = request.broadcast.state, request.broadcast.extras
        try:
            read = self._setup.uplink.unpack(outcome.update, base, received)
        except ValueError:
            return None
        return None if ClientResult(read, outcome.memory).fault(reads_numbers) else read
