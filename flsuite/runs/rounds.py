"""Rounds of a run again: without training, or without some clients.

One-round reconstruction: Song, Tong and Wei 2019, Profit Allocation for Federated Learning, IEEE
Big Data; Liu, Chen, Yu, Liu and Cui 2022, GTG-Shapley, ACM TIST 13(4), arXiv:2109.02053. The models
of a round were trained with all clients. Only their aggregation is done again, which needs no
training.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Broadcast, ClientResult, ClientUpdate, FitRequest, Outcome
from flsuite.common.state import State
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.base import Engine, threads_set
from flsuite.federation.schedules.base import Fit
from flsuite.federation.schedules.faults import Faults
from flsuite.federation.server.evaluation import GLOBAL
from flsuite.runs.checkpoint import load_checkpoint
from flsuite.runs.fork import UPDATES, UpdateStore
from flsuite.runs.preparation import worker_setup
from flsuite.runs.record import kept_rounds
from flsuite.runs.run import Run
from flsuite.runs.table import TimelineRow, timeline_rows


def rehearse(run: Run) -> Iterator[TimelineRow]:
    """Yield the timeline of a run, assuming that no client fails and no callback stops it.

    Nothing is aggregated. If times depend on bytes, every round counts the bytes of the first round
    of the algorithm. SCAFFOLD, for example, sends more in later rounds.

    Args:
        run: A run that has not been opened. Nothing is written, and its model does not change.

    Raises:
        FlsuiteError: If times or clients of the schedule are known only while clients train.
        FederationError: If the schedule reaches a point after which no client is available.
    """
    federation, clock = run.federation, run.federation.clock
    schedule, engine = federation.schedule, _NoTraining()
    if not schedule.is_virtual:
        inner = "schedule." if isinstance(schedule, Faults) else ""
        raise FlsuiteError(
            f"the times of {type(schedule).__name__} are measured while clients train; set "
            f"trainer.schedule.{inner}speeds, for example to Stragglers"
        )
    if schedule.sees_updates:
        raise FlsuiteError(
            "the clients of a round depend on what others have sent before, so that there is no "
            "schedule without training; set trainer.schedule.sampling to uniform"
        )

    while not run.finished:
        federation.open_round()
        engine.submit(_requests(schedule.start(clock)))
        for outcome in schedule.arrivals(engine, clock, _requests):
            # Injected faults are part of the plan: failures, and messages that arrive twice or in
            # a later round.
            if outcome.failed:
                engine.awaited.discard(outcome.number)
            elif (update := outcome.update).number in engine.awaited:
                engine.awaited.remove(update.number)
                update.staleness = clock.round - (update.round - 1)
                federation.log.updates.append(update)
                clock.client_updates += 1
                schedule.accepted(update)
        clock.round += 1
        yield from timeline_rows(federation)


def _requests(fits: Sequence[Fit]) -> list[FitRequest]:
    """Return requests without a model."""
    return [
        FitRequest(fit.number, fit.client, Broadcast(fit.version + 1, {}, {}), {}, fault=fit.fault)
        for fit in fits
    ]


class _NoTraining(Engine):
    """An engine whose fits all end at once. They succeed unless a fault is injected.

    Attributes:
        awaited: The fits that were submitted, until their first outcome arrives.
    """

    def __init__(self) -> None:
        self._requests: dict[int, FitRequest] = {}
        self.awaited: set[int] = set()

    def start(self, setup: WorkerSetup) -> None:
        """Do nothing."""

    def submit(self, requests: Iterable[FitRequest]) -> None:
        own = {request.number: request for request in requests}
        self._requests |= own
        self.awaited |= own.keys()

    @property
    def pending(self) -> Sequence[int]:
        return list(self._requests)

    def collect(self, number: int) -> Outcome:
        request = self._requests.pop(number)
        if request.fault not in (None, "late", "twice", "gone"):  # these happen in transit
            return request.failure(f"on purpose: {request.fault}")
        client, round = request.client, request.broadcast.round
        update = ClientUpdate(client, round, 1, 0, torch.zeros(0), {}, number=number)
        return ClientResult(update, {})


_TRAIN = "train without the client instead"


@dataclass(frozen=True)
class KeptRound:
    """A round whose models are kept, and the federation before it.

    Attributes:
        number: The round, counted from 1.
        run: The run, prepared and not started.
        before: The state of the federation before the round.
        updates: The models of the round's clients, in the order of their aggregation.
    """

    number: int
    run: Run
    before: dict[str, Any]
    updates: tuple[ClientUpdate, ...]

    @property
    def clients(self) -> set[int]:
        """Return the clients that have trained in the round."""
        return {update.client for update in self.updates}

    def without(self, absent: Collection[int]) -> State:
        """Return the global state after the round, aggregated without these clients.

        It is the state before the round if no client is left.
        """
        federation: Any = self.run.federation
        # An aggregator changes its memory and the updates in place.
        federation.load_state_dict(copy.deepcopy(self.before))
        present = [replace(update) for update in self.updates if update.client not in absent]
        if not present:
            return federation.state
        return federation.aggregator.aggregate(federation.server, present)

    def score(self, absent: Collection[int], metric: str) -> float:
        """Return a score on validation data of the state :meth:`without` these clients."""
        federation = self.run.federation
        federation.state = self.without(absent)
        federation.clock.round = self.number
        with threads_set(1):  # the threads of small models wait for each other on a busy machine
            scores = self.run.evaluator.scores(federation, "val", range(0)).get(GLOBAL, {})
        if metric not in scores:
            raise FlsuiteError(
                f"the global model has no val score {metric}; there are "
                f"{', '.join(sorted(scores)) or 'none: set data.val_fraction above 0'}"
            )
        return float(scores[metric])


def read_rounds(
    trainer: Any, run: Run, folder: Path, after: int = 0, remedy: str = _TRAIN
) -> list[KeptRound]:
    """Return the rounds of a run whose models and starting state are kept.

    They are held in memory, with a model per client and round.

    Args:
        trainer: The trainer that has prepared the run.
        run: A run with the settings of the finished run, prepared and not started.
        folder: The folder of the finished run.
        after: Earlier rounds are left out.
        remedy: What an error recommends.

    Raises:
        FlsuiteError: If there are none, if one is missing, or if they cannot be aggregated again.
    """
    refuse_unkept(trainer, run, folder, remedy)
    federation, store, kept = run.federation, UpdateStore(folder / UPDATES), kept_rounds(folder)
    starts = {} if 0 in kept else {0: copy.deepcopy(federation.state_dict())}
    runner, rounds = JobRunner(worker_setup(trainer, run)), []
    trained = [n for n in range(after, max(kept, default=0)) if store.clients(n + 1)]
    if missing := [n for n in trained if n not in {0, *kept}]:
        raise FlsuiteError(
            f"{folder} has not kept {len(missing)} of {len(trained)} states that its rounds began "
            f"from, such as that after round {missing[0]}; fit it with --trainer.keep_rounds 1, or "
            f"{remedy}"
        )
    for start in trained:
        before = starts.get(start) or load_checkpoint(kept[start])["federation"]
        federation.load_state_dict(copy.deepcopy(before))
        rounds.append(KeptRound(start + 1, run, before, _updates(run, runner, store, start)))
    if not rounds:
        raise FlsuiteError(
            f"{folder} has kept no state before the rounds whose models it has kept; fit it with "
            f"--trainer.keep_rounds 1, or {remedy}"
        )
    return rounds


def _updates(
    run: Run, runner: JobRunner, store: UpdateStore, version: int
) -> tuple[ClientUpdate, ...]:
    """Return the updates of the clients that started from a version, made from their models."""
    clients = enumerate(store.clients(version + 1))
    run.federation.open_round()
    requests = run.federation.send([Fit(n, client, version, 0, 0.0) for n, client in clients])
    answers = [runner.answer([store.with_trained(request)]) for request in requests]
    outcomes = [run.federation.check(outcome) for answer in answers for outcome in answer]
    return tuple(o.update for o in outcomes if o and not o.failed)


def refuse_unkept(trainer: Any, run: Run, folder: Path, remedy: str) -> None:
    """Refuse a run whose rounds cannot be aggregated again.

    The arguments are the same as for :func:`read_rounds`.
    """
    if not (folder / UPDATES).is_dir():
        raise FlsuiteError(
            f"{folder} has not kept its clients' models; fit it with --trainer.keep_updates true "
            f"--trainer.keep_rounds 1, or {remedy}"
        )
    if trainer.schedule.is_asynchronous:
        raise FlsuiteError(f"{folder} has no rounds, since its schedule is asynchronous; {remedy}")
    if run.federation.entries.personal:
        raise FlsuiteError(
            f"the clients of {folder} have models of their own, which nobody aggregates; {remedy}"
        )
