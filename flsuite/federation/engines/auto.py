"""Engines that work through others: stacks of clients, and the choice of the fastest engine."""

import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from flsuite.aggregators.part import Named, named, refuse_conflicts
from flsuite.common.arguments import PositiveInt, Settings, Threads
from flsuite.common.errors import one_line
from flsuite.common.messages import FitRequest, Outcome, ScoreRequest
from flsuite.federation.client.conditions import require_stackable
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.base import NO_TIMEOUT, NO_WORKERS, Engine, EngineChoice, InProcess
from flsuite.federation.engines.pool import cores
from flsuite.federation.engines.processes import Processes

log = logging.getLogger("flsuite")

_SECONDS = 1.0  # minimum measured time per engine, unless clients run out
_BATCH = 2.0  # expected seconds of the fits that train at a time while an engine is measured
_SHORT = 4.0  # expected seconds of a run for which no other engine is measured
_WORTH = 0.9  # a stack must take less than this fraction of the time, because its weights differ


@dataclass(eq=False)
class Vectorized(Engine, Settings):
    """Trains clients in stacks: their weights lie along a first axis, and one program steps all.

    Take it for many small clients, and on a GPU.

    Small networks train several times as fast as one after another, because a step of the whole
    stack launches as many operations as a step of one client. Each client takes the same steps on
    the same batches as on other engines. Batched kernels round differently, so the weights differ
    from other engines in the last digits, and a resumed run keeps its stacks. With an asynchronous
    schedule, fits that arrive for the same aggregation train together.

    It takes models with one of torch's elementwise optimizers. The algorithm may change gradients
    (FedProx, SCAFFOLD), train a second model (Ditto), add a term of the features (MOON) or freeze
    layers in some epochs (FedRep; clients with as many batches then train together). ``DPSGD`` may
    add noise; its gradients by sample take the memory of a whole batch of models per client. It
    refuses other models before the first round. Attackers train one by one, and so do clients with
    Lightning callbacks that act in steps or epochs, and the clients of a worker that has died.

    Args:
        clients: Clients per stack.
        workers: Number of worker processes, each with a stack. With 1, this process trains. It does
            not affect the weights.
        threads: torch threads per worker.
        graph: Whether to record a step as a graph of torch's operations once it has occurred often,
            and to replay it. The weights stay the same. It pays from some hundred steps on.
    """

    clients: PositiveInt = 64
    workers: PositiveInt = 1
    threads: Threads = 1
    graph: bool = False

    decides = ("clients",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: Engine = (
            InProcess(self.threads)
            if self.workers == 1
            else Processes(workers=self.workers, threads=self.threads)
        )
        # A resumed run must be able to make the same stacks again.
        self.needs = {"durations known in advance"} if self.workers == 1 else {"rounds"}
        self.withholds = self._engine.withholds

    def start(self, setup: WorkerSetup) -> None:
        require_stackable(setup)
        self._engine.start(replace(setup, stack=self.clients, records=self.graph))

    def submit(self, requests: Iterable[FitRequest]) -> None:
        self._engine.submit(requests)

    def join(self, awaited: Callable[[], Collection[int]]) -> None:
        self._engine.join(awaited)

    @property
    def pending(self) -> Sequence[int]:
        return self._engine.pending

    def collect(self, number: int) -> Outcome:
        return self._engine.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> Any:
        return self._engine.score(requests)

    def stop(self) -> None:
        self._engine.stop()


@dataclass(eq=False)
class Auto(EngineChoice, Settings):
    """Chooses this process, worker processes or stacks of clients, whichever is fastest.

    Take it if you do not know which engine is fastest.

    Before the first round, it trains a few clients on each engine that the run allows, for about a
    second, and drops the results. It then takes the engine with the least expected time for the
    whole run. The log says which and why. A run of a few seconds trains in this process. The choice
    between ``InProcess`` and ``Processes`` does not affect results. ``Vectorized`` rounds
    differently, so the record names it with its stack, and a resumed run keeps the stack. Runs of a
    comparison should name their engine, because two machines may choose differently.

    Args:
        workers: Maximum number of worker processes. Default: the cores, or the GPUs.
        clients: Maximum number of clients per stack.
    """

    workers: PositiveInt | None = None
    clients: PositiveInt = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        # It chooses worker processes for a run in which clients die.
        self.withholds = NO_TIMEOUT if self.workers != 1 else {**NO_TIMEOUT, **NO_WORKERS}

    def choose(
        self,
        setup: WorkerSetup,
        requests: Sequence[FitRequest],
        fits: int,
        schedule: Named,
        at_once: int | None = None,
        before: Mapping[str, Any] | None = None,
    ) -> Engine:
        """Return the engine for a run.

        Args:
            setup: The setup of the run.
            requests: First fits of some of its clients, as many as train at a time.
            fits: The number of fits of the run.
            schedule: What the schedule needs and withholds.
            at_once: Number of fits that may train in one stack, where there are no rounds. Default:
                the fits of a round.
            before: The settings of the run that is resumed, if any.

        Raises:
            FlsuiteError: If no engine can serve the run. Other errors of clients are raised too.
        """
        workers = min(self._workers(setup), len(requests))
        if before is not None and (kept := before.get("engine")):
            size = int(kept["init_args"]["clients"])
            most = 1 if at_once is not None else math.ceil(len(requests) / size)
            chosen = Vectorized(clients=size, workers=min(workers, most))
            log.info("engine: %s (auto: the run began with these stacks)", _name(chosen))
            return chosen
        if setup.uplink.aggregator.pools:
            return InProcess()
        try:
            copy.deepcopy(setup.model)
        except Exception:  # measuring trains copies
            return InProcess()

        candidates: list[Engine] = [InProcess()]
        if workers > 1 or "worker processes" in schedule.needs:
            candidates.append(Processes(workers=workers))
        size = min(self.clients, len(requests), at_once or self.clients)
        if before is not None:
            return fastest(candidates, setup, requests, fits, schedule, "the run began without")
        if size < 2:
            return fastest(candidates, setup, requests, fits, schedule, "one client at a time")
        candidates.append(Vectorized(clients=size))
        if workers > 1 and (share := min(size, math.ceil(len(requests) / workers))) > 1:
            candidates.append(Vectorized(clients=share, workers=workers))
        return fastest(candidates, setup, requests, fits, schedule)

    def _workers(self, setup: WorkerSetup) -> int:
        """Return the number of worker processes that may gain something."""
        kind = setup.trainer_kwargs.get("accelerator")
        has_gpus = kind in ("gpu", "cuda") or (kind in (None, "auto") and torch.cuda.is_available())
        room = torch.cuda.device_count() if has_gpus else cores()
        return room if self.workers is None else min(self.workers, max(room, 1))


def fastest(
    candidates: Sequence[Engine],
    setup: WorkerSetup,
    requests: Sequence[FitRequest],
    fits: int,
    schedule: Named,
    no_stacks: str = "",
) -> Engine:
    """Return the engine with the least expected time for a run, and log the times.

    An engine that the run does not allow is left out. If one takes a few seconds for the whole run,
    the others are not measured.

    Args:
        candidates: The engines.
        setup: The setup of the run.
        requests: First fits of some of its clients.
        fits: The number of fits of the run.
        schedule: What the schedule needs and withholds.
        no_stacks: Why there are no stacks among the candidates.
    """
    costs: dict[Engine, float] = {}
    notes = [f"no stacks: {no_stacks}"] if no_stacks else []
    errors: list[Exception] = []
    for engine in candidates:
        least = min(costs.values(), default=math.inf)
        if least < _SHORT:
            break
        try:
            refuse_conflicts([schedule, named("trainer.engine", engine)])
            costs[engine] = expected_seconds(engine, setup, requests, fits, least / fits)
        except Exception as error:
            errors.append(error)
            notes.append(f"no {_name(engine)}: {one_line(error, 160).partition(';')[0]}")
    if not costs:
        raise errors[0]

    # Stacks round differently, so a small gain is not enough.
    best = min(costs, key=lambda engine: costs[engine] / (_WORTH if engine.decides else 1))
    shown = ", ".join(f"{_name(engine)} {_shown(seconds)}" for engine, seconds in costs.items())
    notes.insert(0, f"for {fits} fits, {shown}")
    log.info("engine: %s (auto: %s)", _name(best), "; ".join(notes))
    return best


def expected_seconds(
    engine: Any, setup: WorkerSetup, requests: Sequence[FitRequest], fits: int, alone: float
) -> float:
    """Return the expected seconds of a run on an engine, after training some of its fits there.

    Args:
        engine: The engine. If a large stack would take long, a smaller one is measured.
        setup: The setup of the run. A copy of its model is trained.
        requests: First fits of some clients.
        fits: The number of fits of the run.
        alone: Expected seconds of one fit, or infinity if unknown.
    """
    stack, workers = getattr(engine, "clients", 1), getattr(engine, "workers", 1)
    size = max(workers * min(stack, 2), min(workers * stack, int(_BATCH / alone)))
    if stack > 1:
        engine = replace(engine, clients=math.ceil(size / workers))
    # Each is a part of a cohort, because without the schedule only fits of a round are stacked.
    requests = [replace(request, part=request.number) for request in requests]
    samples = [setup.data.samples(request.client) for request in requests]

    def train(first: int) -> float:
        """Return the seconds of the fits from this place on that train at a time."""
        began = time.perf_counter()
        engine.submit(requests[first : first + size])
        for number in engine.pending:
            engine.collect(number)
        return time.perf_counter() - began

    with isolate_rng(), _started(engine, setup) as start:
        once = start + train(0)  # includes what is done once
        seconds, trained = 0.0, 0
        for first in range(0, max(1, len(requests) - size + 1), size):
            if seconds > _SECONDS or once > 10 * _SECONDS:
                break
            seconds += train(first)
            trained += sum(samples[first : first + size])
    each = seconds / trained if trained else once / sum(samples[:size])
    return max(0.0, once - each * sum(samples[:size])) + fits * each * sum(samples) / len(samples)


@contextmanager
def _started(engine: Engine, setup: WorkerSetup) -> Iterator[float]:
    """Start an engine on a copy of the model, yield the seconds, and stop the engine."""
    own = replace(setup, model=copy.deepcopy(setup.model))
    began = time.perf_counter()
    try:
        engine.start(own)
        yield time.perf_counter() - began
    finally:
        engine.stop()


def _name(engine: Engine) -> str:
    given = ((name, getattr(engine, name, None)) for name in ("clients", "workers"))
    shown = ", ".join(f"{name}={value}" for name, value in given if value not in (None, 1))
    return f"{type(engine).__name__}({shown})"


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
