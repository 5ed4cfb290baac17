"""Scores of the shared flow of the clients' features, before and after aggregation."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.arguments import PositiveInt, Settings, at_least
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import ClientFailure, Outcome
from flsuite.common.random import numpy_generator, seed_process
from flsuite.common.state import State, Sums, cast, divided, matches
from flsuite.data.spec import DataSplit
from flsuite.models.declarations import parameter_groups
from flsuite.models.modes import evaluating
from flsuite.models.protocols import FlowModel
from flsuite.runs.run import Run


@dataclass(eq=False)
class FlowMonitor(FederationCallback, Settings):
    """Scores the aggregated flow, the mean flow and the clients' flows on held-out samples.

    The held-out samples are test samples of the classes that any client has seen. ``nll`` is the
    negative log-density of z given y, in nats per dimension. All flows are scored on the features
    of the new global model, so that only the flows differ. Logged as ``test/<name>``:

    - ``flow_nll``: nll of the aggregated flow;
    - ``flow_nll_of_mean``: nll of the sample-weighted mean of the same clients' flows (FedAvg);
    - ``flow_nll_before``, ``flow_nll_after``: nll of the client's flow as sent, and of the
      aggregated flow, on samples of the classes that the client trains on; means over clients;
    - ``flow_disagreement``: standard deviation over clients of a held-out sample's nll under their
      flows; mean over samples;
    - ``flow_spread``, ``flow_spread_after``: root mean squared distance of the clients' flow
      parameters from their plain mean, and from the aggregate;
    - ``sample_agreement``: share of samples drawn from the flow, equally many per class, that the
      classifier assigns to their class.

    Args:
        every: Rounds between two measurements. The last round is always measured. Rounds without
            updates are left out.
        samples: Number of held-out samples. They stay the same as long as the classes do.
        clients: Number of clients whose flows are measured: the first of each cohort.
    """

    affects: ClassVar[Affects] = "nothing"

    every: PositiveInt = 5
    samples: Annotated[int, at_least(2)] = 500
    clients: PositiveInt = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flows: dict[int, State] = {}
        self._sums = Sums()

    def on_federation_start(self, run: Run) -> None:
        model = run.evaluator.model
        if not isinstance(model, FlowModel) or "flow" not in parameter_groups(model):
            raise FlsuiteError(
                f"FlowMonitor scores a flow of features, and {type(model).__name__} has none; "
                "use a model such as NFClassifier, or remove the callback"
            )

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        self._flows, self._sums = {}, Sums()

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        # In every round, because an evaluation may make the round the last one.
        if isinstance(outcome, ClientFailure):
            return

        patterns = parameter_groups(run.evaluator.model)["flow"]
        flow = {
            name: value
            for name, value in outcome.update.state.items()
            if matches(name, patterns) and value.is_floating_point()
        }

        samples = outcome.update.samples
        self._sums.add({"flow": flow, "samples": 1.0}, samples)
        if len(self._flows) < self.clients:
            self._flows[outcome.update.client] = flow

    def on_round_end(self, run: Run, round: int) -> None:
        is_due = round % self.every == 0 or run.finished
        if is_due and self._flows:  # a Poisson draw may be empty
            for name, value in self._measure(run, round).items():
                run.log_metric(name, value, split="test")
        self._flows, self._sums = {}, Sums()

    def _measure(self, run: Run, round: int) -> dict[str, float]:
        """Return the measurements of the round just done."""
        evaluator, federation = run.evaluator, run.federation
        data = federation.data.at(run.round)
        rows = numpy_generator(run.options.seed, "flow_monitor").permutation(len(data.test))
        held_out = data.test.take(torch.from_numpy(rows[: self.samples]))
        sums = self._sums.values
        evaluator.load(federation.client_state(None))
        aggregated = {name: federation.state[name] for name in sums["flow"]}
        plain = cast(divided(sums["flow"], sums["samples"]), aggregated)

        nll = self._nll(run, held_out, aggregated)
        sent = {client: self._nll(run, held_out, flow) for client, flow in self._flows.items()}
        spread = torch.stack(list(sent.values())).std(0, correction=0)
        trained = {client: (data.class_counts(client) > 0)[held_out.y] for client in sent}
        numbers = {
            "flow_nll": float(nll.mean()),
            "flow_nll_of_mean": float(self._nll(run, held_out, plain).mean()),
            "flow_disagreement": float(spread.mean()),
            "flow_spread": _distance(self._flows.values(), plain),
            "flow_spread_after": _distance(self._flows.values(), aggregated),
        }
        numbers |= _means(
            flow_nll_before=[column[trained[client]] for client, column in sent.items()],
            flow_nll_after=[nll[trained[client]] for client in sent],
        )
        # Another flow is loaded now, but the samples must come from the aggregated one.
        evaluator.load(aggregated)
        return numbers | {"sample_agreement": self._agreement(run, round, held_out.y.unique())}

    def _nll(self, run: Run, held_out: DataSplit, flow: State) -> Tensor:
        run.evaluator.load(flow)
        return run.evaluator.outputs(held_out)["nll"].double()

    def _agreement(self, run: Run, round: int, classes: Tensor) -> float:
        model = run.evaluator.model
        assert isinstance(model, FlowModel)
        # Rounded up, so that every class has at least one sample.
        per_class = -(-self.samples // len(classes))
        y = classes.repeat_interleave(per_class).to(run.evaluator.device)
        with evaluating(model), torch.inference_mode():
            seed_process(run.options.seed, "flow_monitor", round)
            return float((model.sampled_logits(y).argmax(1) == y).double().mean())


def _means(**columns: list[Tensor]) -> dict[str, float]:
    """Return the mean over samples, averaged over the clients that have samples."""
    means = {}
    for name, parts in columns.items():
        # A client that trains on no held-out class has no mean.
        values = [float(part.mean()) for part in parts if len(part)]
        if values:
            means[name] = sum(values) / len(values)
    return means


def _distance(flows: Collection[State], center: State) -> float:
    """Return the root mean squared distance over parameters and clients."""
    square = sum(
        float((flow[name].double() - center[name]).square().sum())
        for flow in flows
        for name in center
    )
    return math.sqrt(square / (len(flows) * sum(value.numel() for value in center.values())))
