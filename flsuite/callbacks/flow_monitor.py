"""What the shared flow of the clients' features knows, and what aggregation does to it."""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from flsuite.callbacks.base import FederationCallback
from flsuite.data.spec import DataSplit
from flsuite.errors import FlsuiteError, require_at_least
from flsuite.messages import ClientFailure, ClientResult
from flsuite.random import numpy_generator, seed_process
from flsuite.state import RunningMean, State, matches

if TYPE_CHECKING:
    from flsuite.trainer import FederatedTrainer

__all__ = ["FlowModel", "FlowMonitor"]


@runtime_checkable
class FlowModel(Protocol):
    """A model with a density of its features given the class; its evaluation column ``nll`` is what that makes of a sample."""

    def sampled_logits(self, y: Tensor) -> Tensor:
        """The classifier's logits ``(n, classes)`` at one sample of the flow for each class of y ``(n,)``."""
        ...


class FlowMonitor(FederationCallback):
    """Scores the flow on held-out samples: as aggregated, as the plain mean would have made it, and as the clients sent theirs.

    Held out are test samples of the classes that any client has met; ``nll`` is ``-log p(z | y)``, in nats per dimension, with
    the features of the new global model in all cases, so that the flows differ in nothing else. Logged as ``test/<name>``:

    - ``flow_nll``, and ``flow_nll_of_mean``: of the aggregated flow, and of the mean by samples of the same clients' flows,
      which is FedAvg's;
    - ``flow_nll_before``, ``flow_nll_after``: means over clients, on samples of the classes that the client is training on, of
      its own flow as it sent it, and of the aggregated one;
    - ``flow_disagreement``: the standard deviation over clients of what their flows make of a held-out sample, mean over these;
    - ``flow_spread``, ``flow_spread_after``: root mean squared distance of a clients' flow parameters to their plain mean, and
      to the aggregate (more than the former as far as that is not the mean);
    - ``sample_agreement``: of samples of the flow, one class as often as the other, the share that the classifier puts into
      the class that they were drawn for.

    Args:
        every: Rounds between two measurements; the last round is always measured.
        samples: Held-out samples, the same ones as long as the classes are.
        clients: Measure the flows of the first clients of a cohort.
    """

    def __init__(self, every: int = 5, samples: int = 500, clients: int = 10) -> None:
        require_at_least("FlowMonitor", 1, every=every, clients=clients)
        require_at_least("FlowMonitor", 2, samples=samples)
        self.every = every
        self.samples = samples
        self.clients = clients
        self._flows: dict[int, State] = {}
        self._mean = RunningMean()
        self._due = False

    def on_federation_start(self, trainer: "FederatedTrainer") -> None:
        if (
            not isinstance(trainer.evaluator.model, FlowModel)
            or "flow" not in trainer.evaluator.model.parameter_groups
        ):
            raise FlsuiteError(
                f"FlowMonitor scores a flow of features, and {type(trainer.evaluator.model).__name__} has none; "
                "use a model such as NFClassifier, or remove the callback"
            )

    def on_round_start(
        self, trainer: "FederatedTrainer", round: int, cohort: Sequence[int]
    ) -> None:
        self._due = round % self.every == 0 or round == trainer.rounds
        self._flows, self._mean = {}, RunningMean()

    def on_client_end(
        self, trainer: "FederatedTrainer", outcome: ClientResult | ClientFailure
    ) -> None:
        if not self._due or isinstance(outcome, ClientFailure):
            return
        patterns = trainer.evaluator.model.parameter_groups["flow"]
        flow = {
            name: value
            for name, value in outcome.update.state.items()
            if matches(name, patterns) and value.is_floating_point()
        }
        self._mean.add(flow, outcome.update.samples)
        if len(self._flows) < self.clients:
            self._flows[outcome.update.client] = flow

    def on_round_end(self, trainer: "FederatedTrainer", round: int) -> None:
        if not self._due:
            return
        for name, value in self.measure(trainer, round).items():
            trainer.log_metric(name, value, split="test")
        self._flows = {}

    def measure(self, trainer: "FederatedTrainer", round: int) -> dict[str, float]:
        """The numbers of the round just done."""
        federation, evaluator = trainer.federation, trainer.evaluator
        assert federation is not None
        data = federation.current
        rows = numpy_generator(trainer.seed, "flow_monitor").permutation(len(data.test))[
            : self.samples
        ]
        held_out = data.test.take(torch.from_numpy(rows))
        plain = self._mean.mean()
        evaluator.load(federation.client_state(None))
        aggregated = {name: federation.state[name] for name in plain}
        nll = self._nll(trainer, held_out, aggregated)
        found = {
            "flow_nll": float(nll.mean()),
            "flow_nll_of_mean": float(self._nll(trainer, held_out, plain).mean()),
        }
        own = {client: self._nll(trainer, held_out, flow) for client, flow in self._flows.items()}
        trained = {client: (data.class_counts(client) > 0)[held_out.y] for client in own}
        found |= _means(
            flow_nll_before=[column[trained[client]] for client, column in own.items()],
            flow_nll_after=[nll[trained[client]] for client in own],
        )
        found["flow_disagreement"] = float(
            torch.stack(list(own.values())).std(0, correction=0).mean()
        )
        found["flow_spread"] = _distance(self._flows.values(), plain)
        found["flow_spread_after"] = _distance(self._flows.values(), aggregated)
        evaluator.load(aggregated)
        return found | {"sample_agreement": self._agreement(trainer, round, held_out.y.unique())}

    def _nll(self, trainer: "FederatedTrainer", held_out: DataSplit, flow: State) -> Tensor:
        trainer.evaluator.load(flow)
        return trainer.evaluator.outputs(held_out)["nll"].double()

    def _agreement(self, trainer: "FederatedTrainer", round: int, classes: Tensor) -> float:
        evaluator = trainer.evaluator
        model = evaluator.model
        assert isinstance(model, FlowModel)
        y = classes.repeat_interleave(-(-self.samples // len(classes))).to(evaluator.device)
        with evaluator.scoring(), torch.inference_mode():
            seed_process(trainer.seed, "flow_monitor", round)
            return float((model.sampled_logits(y).argmax(1) == y).double().mean())


def _means(**columns: list[Tensor]) -> dict[str, float]:
    """The mean over clients of the mean over their samples; clients without any are left out."""
    found = {}
    for name, parts in columns.items():
        values = [float(part.mean()) for part in parts if len(part)]
        if values:
            found[name] = sum(values) / len(values)
    return found


def _distance(flows: Collection[State], centre: State) -> float:
    """Root mean square over parameters and clients."""
    square = sum(
        float((flow[name].double() - centre[name]).square().sum())
        for flow in flows
        for name in centre
    )
    return math.sqrt(square / (len(flows) * sum(value.numel() for value in centre.values())))
