"""Engine with the actors of a Ray cluster, on one machine or many."""

import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from flsuite.common.arguments import PositiveFloat, PositiveInt, Range, Settings, Threads, at_least
from flsuite.common.errors import FederationError, FlsuiteError, one_line
from flsuite.common.messages import Broadcast, ClientResult, ScoreRequest
from flsuite.common.state import nbytes
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.pool import Backlog, Job, Pool, Request, without_broadcast
from flsuite.federation.engines.ray_cluster import (
    Needs,
    join,
    leave,
    number_of_workers,
    refuse_hidden_gpus,
)
from flsuite.federation.engines.ray_worker import SMALL, RayWorker, pack, unpack
from flsuite.federation.engines.wire import Fatal, dump_without_data

log = logging.getLogger("flsuite")

_Gpus = Annotated[
    float,
    at_least(0),
    Range("a share of one GPU or a whole number", lambda gpus: gpus <= 1 or gpus % 1 == 0),
]

_SECONDS = 0.1  # minimum training per call: a call costs 1 to 2 ms
_CLIENTS = 10  # maximum per call
_BYTES = 2**26  # maximum models returned per call: bounds memory
_CALLS = 2  # in flight per worker: its next call is ready when one ends
_AHEAD = 4  # calls per worker in flight or uncollected
_STARTS = 3  # maximum worker deaths in a row during startup
_GLANCE = 10.0  # seconds without an answer before the cluster is checked
_PATIENCE = 6  # checks before a warning that no worker has started
_FETCH = 600.0  # maximum seconds to fetch an answer that is ready, perhaps from another machine


@dataclass(eq=False)
class _Actor:
    """A worker as seen by the driver.

    Attributes:
        handle: Ray's handle.
        is_ready: Whether its setup is complete.
        calls: Its unanswered calls, oldest first.
    """

    handle: Any
    is_ready: bool = False
    calls: list["_Call"] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """A call in flight: a list of jobs, answered by the list of their outcomes.

    Attributes:
        jobs: The jobs, all from one broadcast.
        sign: Becomes ready when an idle worker starts a single-client call. ``None`` for others.
        ends: Time at which its worker times out, by the monotonic clock.
    """

    jobs: Sequence[Job]
    sign: Any = None
    ends: float = math.inf


@dataclass(eq=False)
class Ray(Pool, Settings):
    """Trains in the actors of a Ray cluster.

    The dataset is in memory once per machine, and a broadcast is sent once to each machine. The
    clients of a dead worker go to another one, and a new worker is started if there is room.
    Requires the extra ``flsuite[ray]``.

    Args:
        workers: Number of workers. Default: as many as fit into the cluster.
        cpus_per_worker: Cores that the cluster reserves per worker. It may be a fraction.
        gpus_per_worker: Fraction of a GPU, or number of GPUs, reserved per worker. With 0, workers
            see no GPU.
        address: The cluster to join: ``auto`` for the one running on this machine, or
            ``HOST:PORT``. Default: a local cluster for the duration of the run.
        threads: torch threads per worker.
        runtime_env: Ray's runtime environment of the workers, passed through.
        timeout: Maximum seconds of one client's fit. A worker that takes longer is replaced, and
            its client counts as failed. Workers then receive one client at a time. Default: no
            limit.
    """

    workers: PositiveInt | None = None
    cpus_per_worker: PositiveFloat = 1
    gpus_per_worker: _Gpus = 0
    address: str | None = None
    threads: Threads = 1
    runtime_env: dict[str, Any] | None = None
    timeout: PositiveFloat | None = None

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            raise FlsuiteError("Ray needs the package ray: pip install 'flsuite[ray]'")
        super().__post_init__()
        self._owns_connection = False
        self._forget()

    def _forget(self) -> None:
        self._backlog = Backlog()
        self._actors: list[_Actor] = []
        self._waiting: dict[Any, tuple[_Actor, _Call | None]] = {}
        self._broadcasts: list[tuple[Broadcast, int, Any]] = []
        self._setup: Any = None
        self._versions = 0
        self._seconds = _SECONDS  # duration of the last fit
        self._failed_starts = 0
        self._glances = 0

    def start(self, setup: WorkerSetup) -> None:
        self.stop()
        refuse_hidden_gpus(setup, self.gpus_per_worker)
        self._sums_parts, self._clients = setup.sums_parts, setup.stack
        with self._sendable("the model, the aggregator or the data"):
            payload = pack((setup.data, dump_without_data(setup)))

        try:
            self._owns_connection = join(self.address, self.runtime_env)
            import ray

            number = number_of_workers(self.workers, self._needs())
            self._setup = ray.put(payload)
            for _ in range(number):
                self._spawn()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        actors = self._actors
        self._forget()
        if not actors and not self._owns_connection:
            return

        import ray

        owned, self._owns_connection = self._owns_connection, False
        # Without a connection, ray.kill searches for a cluster for minutes.
        for actor in actors if ray.is_initialized() else ():
            with suppress(Exception):  # a worker, or the cluster, may be gone
                ray.kill(actor.handle)
        if owned:
            leave()

    # From requests to calls

    def _workers(self) -> int:
        return len(self._actors)

    def _hand_out(self, urgent: int | None = None) -> None:
        while (first := self._backlog.first) is not None:
            per_call = self._clients_per_call(first[0])
            workers = max(1, sum(actor.is_ready for actor in self._actors))
            room = _AHEAD * per_call * workers - self._backlog.in_hand
            if room < 1 and all(request.number != urgent for request in first):
                return
            actor = self._free_actor(idle=self._backlog.has_died(first))
            if actor is None:
                return

            # Shorten calls toward the end of the queue, so workers finish together.
            share = -(-self._backlog.queued // (2 * workers))
            self._call(actor, self._next_jobs(max(1, min(share, per_call, room))))

    def _clients_per_call(self, request: Request) -> int:
        """Return the number of clients for a call. Results do not depend on it."""
        # A score takes as long as many fits. A timeout applies to a single fit.
        if isinstance(request, ScoreRequest) or self.timeout is not None:
            return 1
        size = nbytes(request.broadcast.state) + nbytes(request.memory)
        worthwhile = math.ceil(_SECONDS / max(self._seconds, 1e-4))
        return max(1, min(_CLIENTS, worthwhile, _BYTES // max(1, size)))

    def _free_actor(self, idle: bool) -> _Actor | None:
        """Return the worker with the fewest calls, if it can accept one more."""
        most = 1 if idle or self.timeout is not None else _CALLS
        free = [
            actor
            for actor in self._actors
            if actor.is_ready
            and len(actor.calls) < most
            # A suspect of killing a worker runs alone, so no other client is blamed.
            and not any(self._backlog.has_died(call.jobs[0]) for call in actor.calls)
        ]
        return min(free, key=lambda actor: len(actor.calls), default=None)

    def _next_jobs(self, most: int) -> list[Job]:
        """Take jobs of one broadcast off the queue, with about ``most`` clients.

        A job whose worker died is alone.
        """
        backlog = self._backlog
        jobs = [backlog.take()]
        clients = len(jobs[0])
        while clients < most and not backlog.has_died(jobs[0]):
            following = backlog.first
            if (
                following is None
                or clients + len(following) > most
                or following[0].broadcast is not jobs[0][0].broadcast
                or backlog.has_died(following)
            ):
                break
            jobs.append(backlog.take())
            clients += len(following)
        return jobs

    def _call(self, actor: _Actor, jobs: Sequence[Job]) -> None:
        with self._sendable("a callback or what a client keeps"):
            version, broadcast = self._put(jobs[0][0].broadcast)
            orders = pack([without_broadcast(job) for job in jobs])

        # A worker killed before starting a job did not die because of it.
        is_suspect = not actor.calls and len(jobs) == len(jobs[0]) == 1
        sign = actor.handle.alive.remote() if is_suspect else None
        call = _Call(jobs, sign)
        if self.timeout is not None and not isinstance(jobs[0][0], ScoreRequest):
            call.ends = time.monotonic() + self.timeout
        actor.calls.append(call)
        self._waiting[actor.handle.work.remote(version, broadcast, orders)] = (actor, call)

    def _put(self, broadcast: Broadcast) -> tuple[int, Any]:
        """Return the number of a broadcast, and its reference in the object store."""
        import ray

        for known, version, place in self._broadcasts:
            if known is broadcast:
                return version, place

        # Keep earlier broadcasts while uncollected requests start from them.
        needed = {id(earlier) for earlier in self._backlog.broadcasts()}
        self._broadcasts = [entry for entry in self._broadcasts if id(entry[0]) in needed]
        self._versions += 1
        place = ray.put(pack(broadcast, whole=nbytes(broadcast.state) < SMALL))
        self._broadcasts.append((broadcast, self._versions, place))
        return self._versions, place

    # From answers to outcomes

    def _wait(self) -> None:
        """Wait until a worker answers, becomes ready, dies, or times out.

        Without ``timeout``, the caller waits without a limit: a fit takes as long as it does, and
        others may use the cluster. Every ``_GLANCE`` seconds, the cluster is checked.
        """
        import ray

        if not self._waiting:
            raise FederationError("Ray: no worker is left")
        ends = min((call.ends for _, call in self._waiting.values() if call), default=math.inf)
        patience = min(_GLANCE, max(0.0, ends - time.monotonic()))
        ready, _ = ray.wait(list(self._waiting), timeout=patience)
        if not ready and ends <= time.monotonic():
            self._replace_overdue()
            return
        if not ready:
            self._look_at_cluster()
            return

        actor, call = self._waiting.pop(ready[0])
        try:
            answer = unpack(ray.get(ready[0], timeout=_FETCH))
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"a worker failed:\n{error}") from error
        except ray.exceptions.RayError as error:  # the worker, its node or the answer is lost
            self._take_death(actor, error)
            return

        if isinstance(answer, Fatal):
            raise answer.error()
        if call is None:
            actor.is_ready = True
            self._failed_starts = 0
            return
        actor.calls.remove(call)
        for job, outcomes in zip(call.jobs, answer, strict=True):
            self._backlog.answer(job, outcomes)
            for outcome in outcomes:
                if isinstance(outcome, ClientResult):
                    self._seconds = outcome.update.seconds

    def _replace_overdue(self) -> None:
        """Replace workers that have timed out. Their clients fail."""
        overdue = [
            (actor, call)
            for actor, call in self._waiting.values()
            if call is not None and call.ends <= time.monotonic()
        ]
        for actor, call in overdue:
            self._remove(actor)
            self._take_back(call.jobs, death=None)
            self._spawn()

    def _remove(self, actor: _Actor) -> None:
        """Kill a worker, and forget it and its calls."""
        import ray

        with suppress(Exception):  # Ray reports some workers as unavailable that would come back
            ray.kill(actor.handle)
        self._actors.remove(actor)
        self._waiting = {
            ref: entry for ref, entry in self._waiting.items() if entry[0] is not actor
        }

    def _take_death(self, actor: _Actor, error: Exception) -> None:
        """Requeue a dead worker's clients, and start a new worker."""
        self._remove(actor)
        reason = _reason(error)
        if not actor.is_ready:
            self._take_failed_start(reason)
            return

        # The answer to the oldest call may be lost with the worker.
        jobs = [job for call in actor.calls for job in call.jobs]
        self._take_back(jobs, reason, was_read=all(_was_read(call) for call in actor.calls))
        self._spawn()

    def _take_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        log.warning("a worker died while it started (%s)", reason)
        if self._failed_starts < _STARTS:
            self._spawn()
        elif not self._actors:
            raise FederationError(
                f"Ray: {_STARTS} workers in a row died while they started; the last one: {reason}"
            )

    def _look_at_cluster(self) -> None:
        """Report why no worker has answered, if none has started."""
        import ray

        if any(actor.is_ready for actor in self._actors):
            return
        if not self._needs().room(ray.nodes()):
            raise FederationError(
                f"Ray: no node of the cluster has room for a worker any more ({self._needs()})"
            )
        self._glances += 1
        if self._glances == _PATIENCE:
            log.warning("no worker of Ray has started yet; others may be using the cluster")

    def _needs(self) -> Needs:
        return Needs(self.cpus_per_worker, self.gpus_per_worker)

    def _spawn(self) -> None:
        import ray

        actor_class = ray.remote(RayWorker).options(
            num_cpus=self.cpus_per_worker,
            num_gpus=self.gpus_per_worker,
            scheduling_strategy="SPREAD",
        )
        path = [str(Path(folder).resolve()) for folder in sys.path]
        actor = _Actor(actor_class.remote(self.threads, path, self.gpus_per_worker > 0))
        self._actors.append(actor)
        self._waiting[actor.handle.prepare.remote(self._setup)] = (actor, None)


def _reason(error: Exception) -> str:
    """Return the first sentence of the last line of Ray's message, which has the cause."""
    return one_line(str(error).split("\n")[-1].split(". ")[0], 200)


def _was_read(call: _Call) -> bool:
    """Return whether a dead worker had started this call."""
    import ray

    if call.sign is None:
        return True
    try:
        ray.get(call.sign, timeout=_GLANCE)
    except ray.exceptions.RayError:  # also raised if the answer is lost
        return False
    return True
