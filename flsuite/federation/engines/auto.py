"""The engine that chooses between the other engines by measuring."""

import copy
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError, one_line
from flsuite.common.messages import Fault, FitRequest
from flsuite.federation.client.jobs import JobRunner
from flsuite.federation.client.runner import ClientRunner
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.client.stackable import refuse_callbacks, require_stackable
from flsuite.federation.engines.base import (
    Engine,
    EngineChoice,
    EngineDeclarations,
    InProcess,
    threads_set,
)
from flsuite.federation.engines.pool import cores
from flsuite.federation.engines.processes import Processes
from flsuite.federation.engines.vectorized import Vectorized
from flsuite.models.layers import has_gradient_hooks

log = logging.getLogger("flsuite")

_SECONDS = 1.0  # minimum measured time per way of training, unless clients run out
_STACK = 2.0  # maximum expected seconds of the measured stack
_START = 4.0  # seconds until worker processes train
_SHARE = 0.8  # of a core that a worker gains on top of the first one
_WORTH = 0.9  # a stack must take less than this fraction of the time, because its weights differ


@dataclass
class _Way:
    """One way of training, with its expected cost.

    Attributes:
        engine: The engine.
        seconds: Expected seconds per fit, in a running engine.
        start: Expected seconds until it runs.
    """

    engine: Engine
    seconds: float
    start: float = 0.0

    @property
    def worth(self) -> float:
        """Return a divisor of its cost. Stacks round differently, so a small gain is not enough."""
        return _WORTH if self.engine.declarations.decides else 1.0

    def of(self, fits: float) -> float:
        """Return the expected seconds of so many fits."""
        return self.start + fits * self.seconds


@dataclass(eq=False)
class Auto(EngineChoice, Settings):
    """Chooses this process, worker processes or stacks of clients, whichever is fastest.

    Before the first round, it trains a client and, if the run allows it, a stack of clients for
    about a second each, on this machine, and drops the results. It then takes the engine with the
    least expected time for the whole run. The log says which and why. The choice between
    ``InProcess`` and ``Processes`` does not affect results. ``Vectorized`` rounds differently, so
    the record names it with its stack, and a resumed run keeps the stack. Runs of a
    comparison should name their engine, because two machines may choose differently.

    Args:
        workers: Maximum number of worker processes. Default: the cores, or the GPUs.
        clients: Maximum number of clients per stack.
    """

    workers: PositiveInt | None = None
    clients: PositiveInt = 64

    @property
    def declarations(self) -> EngineDeclarations:
        # It chooses worker processes for a run in which clients die.
        more: set[Fault] = set() if self.workers == 1 else {"dies"}
        return EngineDeclarations(survives=EngineDeclarations.survives | more)

    def choose(
        self,
        setup: WorkerSetup,
        requests: Sequence[FitRequest],
        fits: int,
        faults: Collection[Fault] = (),
        at_once: int | None = None,
        measures: bool = False,
        before: Mapping[str, Any] | None = None,
    ) -> Engine:
        """Return the engine for a run.

        Args:
            setup: The setup of the run.
            requests: First fits of some of its clients, as many as train at a time.
            fits: The number of fits of the run.
            faults: Injected faults, which the engine must survive.
            at_once: Number of fits that may train in one stack, where there are no rounds. Such
                stacks are of one process. Default: the fits of a round.
            measures: Whether the schedule needs the seconds of each fit by itself.
            before: The settings of the run that is resumed, if any.
        """
        if before is not None and (kept := before.get("engine")):
            size = int(kept["init_args"]["clients"])
            most = 1 if at_once else math.ceil(len(requests) / size)
            engine = Vectorized(clients=size, workers=min(self._workers(setup), most))
            log.info("engine: %s (auto: the run began with these stacks)", _name(engine))
            return engine
        if setup.uplink.aggregator.pools or not _can_be_copied(setup):
            return InProcess()
        with isolate_rng():
            ways = self._plain(setup, requests)
            size = min(self.clients, len(requests), at_once or self.clients)
            why = "the run began without" if before is not None else _fault(setup, requests, size)
            why = "durations are measured" if measures else why
            if why is None:
                stacks = self._stacks(setup, requests, size, ways[0].seconds)
                ways += [way for way in stacks if way.engine.declarations.joins or at_once is None]
        ways = [way for way in ways if not {*faults} - way.engine.declarations.survives] or ways
        best = min(ways, key=lambda way: way.of(fits) / way.worth)
        costs = ", ".join(f"{_name(way.engine)} {_shown(way.of(fits))}" for way in ways)
        more = f"; no stacks: {why}" if why else ""
        log.info("engine: %s (auto: for %d fits, %s%s)", _name(best.engine), fits, costs, more)
        return best.engine

    def _plain(self, setup: WorkerSetup, requests: Sequence[FitRequest]) -> list[_Way]:
        """Return this process, and worker processes if there is something to share."""
        alone = _seconds_alone(setup, requests)
        workers = min(self._workers(setup), len(requests))
        ways = [_Way(InProcess(), alone)]
        if workers > 1:
            ways.append(_Way(Processes(workers=workers), alone / _gain(workers), _START))
        return ways

    def _stacks(
        self, setup: WorkerSetup, requests: Sequence[FitRequest], size: int, alone: float
    ) -> list[_Way]:
        """Return stacks in this process, and in worker processes if there is enough to share."""
        workers = self._workers(setup)
        seconds = _seconds_stacked(setup, requests, size, alone)
        ways = [_Way(Vectorized(clients=size), seconds)]
        if (shared := min(size, math.ceil(len(requests) / workers))) > 1 and workers > 1:
            engine = Vectorized(clients=shared, workers=workers)
            # A step costs about the same whatever the stack, plus a part per client.
            per_client = (size * seconds - alone) / (size - 1)
            smaller = max(seconds, (alone + per_client * (shared - 1)) / shared)
            ways.append(_Way(engine, smaller / _gain(workers), _START))
        return ways

    def _workers(self, setup: WorkerSetup) -> int:
        """Return the number of worker processes that may gain something."""
        kind = setup.trainer_kwargs.get("accelerator")
        has_gpus = kind in ("gpu", "cuda") or (kind in (None, "auto") and torch.cuda.is_available())
        room = torch.cuda.device_count() if has_gpus else cores()
        return room if self.workers is None else min(self.workers, max(room, 1))


def _fault(setup: WorkerSetup, requests: Sequence[FitRequest], size: int) -> str | None:
    """Return why clients cannot train in stacks of this size, or ``None`` if they can."""
    if size < 2:
        return "one client at a time"
    try:
        require_stackable(setup)
        refuse_callbacks(requests[0])
    except FlsuiteError as error:
        return one_line(error, 160).split("; set trainer.engine")[0]
    return None


def _seconds_alone(setup: WorkerSetup, requests: Sequence[FitRequest]) -> float:
    """Return the seconds of a fit of mean size, one client after another."""
    runner = ClientRunner(_copied(setup))
    sizes = [setup.data.samples(request.client) for request in requests]
    mean = sum(sizes) / len(sizes)
    with threads_set(1):
        first = _timed(partial(runner.run, requests[0]))  # includes what is done once
        seconds, samples = 0.0, 0
        for request, size in zip(requests[1:] or requests, sizes[1:] or sizes, strict=True):
            if seconds > _SECONDS or first > 10 * _SECONDS:
                break
            seconds += _timed(partial(runner.run, request))
            samples += size
    return first if not samples else seconds / samples * mean


def _seconds_stacked(
    setup: WorkerSetup, requests: Sequence[FitRequest], size: int, alone: float
) -> float:
    """Return the seconds per fit in a stack of this size, or in a smaller one if that is slow."""
    few = list(requests[: max(2, min(size, int(_STACK / max(alone, 1e-6))))])
    runner = JobRunner(replace(_copied(setup), stack=len(few)))
    with threads_set(1):
        first = _timed(partial(runner.answer, few))
        seconds = first if first > 2 * _STACK else _timed(partial(runner.answer, few))
    return seconds / len(few)


def _gain(workers: int) -> float:
    return 1 + _SHARE * (workers - 1)


def _can_be_copied(setup: WorkerSetup) -> bool:
    """Return whether other processes or stacks can have copies of the model."""
    try:
        _copied(setup)
    except Exception:
        return False
    return not has_gradient_hooks(setup.model)


def _copied(setup: WorkerSetup) -> WorkerSetup:
    return replace(setup, model=copy.deepcopy(setup.model))


def _timed(train: Callable[[], Any]) -> float:
    started = time.perf_counter()
    train()
    return time.perf_counter() - started


def _name(engine: Engine) -> str:
    named = ((name, getattr(engine, name, None)) for name in ("clients", "workers"))
    shown = ", ".join(f"{name}={value}" for name, value in named if value not in (None, 1))
    return f"{type(engine).__name__}({shown})"


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
