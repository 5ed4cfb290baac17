"""Engine with the actors of a Ray cluster, on one machine or many."""

import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flsuite.common.arguments import PositiveFloat, PositiveInt, Range, Threads, at_least
from flsuite.common.errors import FederationError, FlsuiteError, log, one_line, require_extra
from flsuite.common.messages import Broadcast, ClientResult, FitRequest, ScoreRequest
from flsuite.common.state import nbytes
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.engines.pool import Pool, Worker
from flsuite.federation.engines.ray_cluster import (
    RayWorker,
    joined,
    number_of_workers,
    pack,
    room,
    unpack,
)
from flsuite.federation.engines.wire import Jobs, split

_Gpus = Annotated[
    float,
    at_least(0),
    Range("a share of one GPU or a whole number", lambda gpus: gpus <= 1 or gpus % 1 == 0),
]

_SECONDS = 0.1  # minimum training per call: a call costs 1 to 2 ms
_CLIENTS = 10  # maximum per call
_BYTES = 2**26  # maximum models returned per call: bounds memory
_GLANCE = 10.0  # seconds without an answer before the cluster is checked
_PATIENCE = 6  # checks before a warning that no worker has started
_FETCH = 600.0  # maximum seconds to fetch an answer that is ready, perhaps from another machine


@dataclass(eq=False, kw_only=True)
class _Actor(Worker):
    """An actor.

    Attributes:
        handle: Ray's handle.
        answers: References of the answers to its setup and its calls, oldest first.
        sign: Becomes ready when an idle worker starts its only call, of a single client. ``None``
            for others.
        ends: Time at which it times out, by the monotonic clock.
    """

    handle: Any
    answers: list[Any] = field(default_factory=list)
    sign: Any = None
    ends: float = math.inf


@dataclass(eq=False)
class Ray(Pool):
    """Trains in the actors of a Ray cluster.

    Take it on several machines.

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

    calls_at_once = 2  # the next call is there when one ends

    def __post_init__(self) -> None:
        require_extra("Ray", ("ray",), "ray")
        super().__post_init__()

    def _forget(self) -> None:
        super()._forget()
        self._cluster = ExitStack()
        self._payload: Any = None
        # By the identity of a broadcast, which is therefore kept: its number and its reference.
        self._broadcasts: dict[int, tuple[Broadcast, int, Any]] = {}
        self._versions = 0
        self._seconds = _SECONDS  # duration of the last fit
        self._glances = 0

    def _open(self, setup: WorkerSetup) -> int:
        accelerator = setup.trainer_kwargs.get("accelerator")
        if accelerator in ("gpu", "cuda") and not self.gpus_per_worker:
            raise FlsuiteError(
                f"trainer: accelerator {accelerator} needs engine.gpus_per_worker above 0; workers "
                "of Ray see only the GPUs that are reserved for them"
            )
        with self._sendable("the model, the aggregator or the data"):
            payload = pack(split(setup))

        self._cluster.enter_context(joined(self.address, self.runtime_env))
        import ray

        number = number_of_workers(self.workers, self.cpus_per_worker, self.gpus_per_worker)
        self._payload = ray.put(payload)
        return number

    def _spawn(self, number: int) -> _Actor:
        import ray

        actor_class = ray.remote(RayWorker).options(
            num_cpus=self.cpus_per_worker,
            num_gpus=self.gpus_per_worker,
            scheduling_strategy="SPREAD",
        )
        path = [str(Path(folder).resolve()) for folder in sys.path]
        handle = actor_class.remote(self.threads, path, self.gpus_per_worker > 0)
        return _Actor(number, handle=handle, answers=[handle.prepare.remote(self._payload)])

    def _clients_per_call(self, request: FitRequest | ScoreRequest) -> int:
        # A score takes as long as many fits. A timeout applies to a single fit.
        if request.is_score or self.timeout is not None:
            return 1
        size = nbytes(request.broadcast.state) + nbytes(request.memory)
        worthwhile = math.ceil(_SECONDS / max(self._seconds, 1e-4))
        return max(1, min(_CLIENTS, worthwhile, _BYTES // max(1, size)))

    def _send(self, worker: _Actor, broadcast: Broadcast, jobs: Jobs) -> None:
        version, reference = self._put(broadcast)
        packed = pack(jobs)

        # A worker killed before starting a job did not die because of it.
        is_suspect = len(worker.calls) == len(jobs) == len(jobs[0]) == 1
        worker.sign = worker.handle.alive.remote() if is_suspect else None
        if (limit := self._limit(jobs[0][0])) is not None:
            worker.ends = time.monotonic() + limit
        worker.answers.append(worker.handle.work.remote(version, reference, packed))

    def _put(self, broadcast: Broadcast) -> tuple[int, Any]:
        """Return the number of a broadcast, and its reference in the object store."""
        import ray

        if id(broadcast) not in self._broadcasts:
            # Keep earlier broadcasts while uncollected requests start from them.
            needed = self._backlog.broadcasts()
            self._broadcasts = {key: v for key, v in self._broadcasts.items() if key in needed}
            self._versions += 1
            self._broadcasts[id(broadcast)] = broadcast, self._versions, ray.put(pack(broadcast))
        return self._broadcasts[id(broadcast)][1:]

    def _wait(self) -> None:
        """Wait until a worker answers, becomes ready, dies, or times out.

        Without ``timeout``, the caller waits without a limit: a fit takes as long as it does, and
        others may use the cluster. Every ``_GLANCE`` seconds, the cluster is checked.
        """
        import ray

        waiting = {answer: worker for worker in self._pool for answer in worker.answers}
        ends = min(worker.ends for worker in self._pool)
        patience = min(_GLANCE, max(0.0, ends - time.monotonic()))
        ready, _ = ray.wait(list(waiting), timeout=patience)
        if ready:
            self._receive(waiting[ready[0]])
        elif ends <= time.monotonic():
            for overdue in [worker for worker in self._pool if worker.ends <= time.monotonic()]:
                self._replace(overdue, None)
        else:
            self._look_at_cluster()

    def _receive(self, worker: _Actor) -> None:
        """Store the oldest answer of a worker, or replace the worker if it died."""
        import ray

        worker.ends = math.inf
        try:
            answer = unpack(ray.get(worker.answers.pop(0), timeout=_FETCH))
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"a worker failed:\n{error}") from error
        except ray.exceptions.RayError as error:  # the worker, its node or the answer is lost
            # The last line of Ray's message has the cause.
            cause = one_line(str(error).split("\n")[-1].split(". ")[0], 200)
            self._replace(worker, cause, was_read=_was_read(worker))
            return

        self._take_answer(worker, answer)
        worker.sign = None
        for outcomes in answer or ():
            for outcome in outcomes:
                if isinstance(outcome, ClientResult):
                    self._seconds = outcome.update.seconds

    def _look_at_cluster(self) -> None:
        """Report why no worker has answered, if none has started."""
        import ray

        if any(worker.is_ready for worker in self._pool):
            return
        if not room(ray.nodes(), self.cpus_per_worker, self.gpus_per_worker):
            raise FederationError(
                "Ray: no node of the cluster has room for a worker any more "
                f"({self.cpus_per_worker:g} CPUs and {self.gpus_per_worker:g} GPUs each)"
            )
        self._glances += 1
        if self._glances == _PATIENCE:
            log.warning("no worker of Ray has started yet; others may be using the cluster")

    def _kill(self, worker: _Actor) -> None:
        import ray

        with suppress(Exception):  # Ray reports some workers as unavailable that would come back
            ray.kill(worker.handle)

    def _close(self, pool: Sequence[_Actor]) -> None:
        if pool:
            import ray

            # Without a connection, ray.kill searches for a cluster for minutes.
            if ray.is_initialized():
                for worker in pool:
                    self._kill(worker)
        self._cluster.close()


def _was_read(worker: _Actor) -> bool:
    """Return whether a dead worker had started its only call."""
    import ray

    if worker.sign is None:
        return True
    try:
        ray.get(worker.sign, timeout=_GLANCE)
    except ray.exceptions.RayError:  # also raised if the answer is lost
        return False
    return True
