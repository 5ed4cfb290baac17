"""The engine that trains many clients as one batched program."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flsuite.common.arguments import PositiveInt, Settings, Threads
from flsuite.common.messages import FitRequest, Outcome, ScoreRequest
from flsuite.federation.client.setup import WorkerSetup
from flsuite.federation.client.stackable import refuse_callbacks, require_stackable
from flsuite.federation.engines.base import Engine, EngineDeclarations, InProcess
from flsuite.federation.engines.processes import Processes


@dataclass(eq=False)
class Vectorized(Engine, Settings):
    """Trains clients in stacks: their weights lie along a first axis, and one program steps all.

    Small networks train several times as fast as one after another, because a step of the whole
    stack launches as many operations as a step of one client. Each client takes the same steps on
    the same batches as on other engines. Batched kernels round differently, so the weights differ
    from other engines in the last digits, and a resumed run keeps its stacks. With an asynchronous
    schedule, fits that arrive for the same aggregation train together.

    It takes models with one of torch's elementwise optimizers. The algorithm may change gradients
    (FedProx, SCAFFOLD), train a second model (Ditto), add a term of the features (MOON) or freeze
    layers in some epochs (FedRep; clients with as many batches then train together). ``DPSGD`` may
    add noise; its gradients by sample take the memory of a whole batch of models per client. It
    refuses other models and algorithms before the first round. Attackers train one by one, and so
    do the clients of a worker that has died.

    Args:
        clients: Clients per stack.
        workers: Number of worker processes, each with a stack. With 1, this process trains. It does
            not affect the weights.
        threads: torch threads per worker.
    """

    clients: PositiveInt = 64
    workers: PositiveInt = 1
    threads: Threads = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine: Engine = (
            InProcess(self.threads)
            if self.workers == 1
            else Processes(workers=self.workers, threads=self.threads)
        )

    @property
    def declarations(self) -> EngineDeclarations:
        return replace(self._engine.declarations, decides=("clients",), joins=self.workers == 1)

    def start(self, setup: WorkerSetup) -> None:
        require_stackable(setup)
        self._engine.start(replace(setup, stack=self.clients))

    def submit(self, requests: Iterable[FitRequest]) -> None:
        requests = list(requests)
        for request in requests:
            refuse_callbacks(request)
        self._engine.submit(requests)

    def join(self, numbers: Collection[int]) -> None:
        self._engine.join(numbers)

    @property
    def pending(self) -> Sequence[int]:
        return self._engine.pending

    def collect(self, number: int) -> Outcome:
        return self._engine.collect(number)

    def score(self, requests: Iterable[ScoreRequest]) -> Any:
        return self._engine.score(requests)

    def stop(self) -> None:
        self._engine.stop()
