"""Callbacks that look into the model: its flow, its latent space, and a probe on it."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback, is_due, require_model
from flsuite.common.arguments import NonNegativeInt, PositiveInt, Settings, at_least
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Outcome
from flsuite.common.random import numpy_generator, seed_for, seed_process
from flsuite.common.state import State, Sums, cast, divided, matches
from flsuite.data.federated import DataSplit
from flsuite.models.abilities import FlowModel, LatentModel, PriorModel, parameter_groups
from flsuite.models.modes import evaluating
from flsuite.runs.run import Run


@dataclass(eq=False)
class FlowMonitor(FederationCallback, Settings):
    """Scores the aggregated flow, the mean flow and the clients' flows on held-out samples.

    Take it with ``NFClassifier``, to see what averaging does to its flow.

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
        needs = "FlowMonitor scores a flow of features"
        model = require_model(run, FlowModel, needs, "NFClassifier")
        if "flow" not in parameter_groups(model):
            raise FlsuiteError(
                f"{needs}, and {type(model).__name__} has no parameter group flow for it; add it, "
                "or remove the callback"
            )

    def on_round_start(self, run: Run, round: int, clients: Sequence[int]) -> None:
        self._flows, self._sums = {}, Sums()

    def on_client_end(self, run: Run, outcome: Outcome) -> None:
        # In every round, because an evaluation may make the round the last one.
        if outcome.failed:
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
        if is_due(run, self.every) and self._flows:  # a Poisson draw may be empty
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
        model: Any = run.evaluator.model  # a FlowModel
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


@dataclass(eq=False)
class LatentSpace(FederationCallback, Settings):
    """Draws latent means with the class priors, and logs the distances between the priors.

    Take it with ``ACVAE``, to see its class priors move.

    Logged in every round as ``train/<name>``: ``prior_distance_min`` and ``prior_distance_mean``
    over pairs of classes, ``prior_sigma_min``. The picture is written to ``latent/round-NNNN.png``
    in the run's folder, and sent to the loggers as ``latent``. It has one panel per client. Its two
    axes are the first principal components of the class centers, along which the centers differ
    most.

    Args:
        every: Rounds between two pictures. The last round is always drawn. 0 draws none.
        clients: Number of panels, one for each of the first clients.
        samples: Test samples per panel.
    """

    affects: ClassVar[Affects] = "nothing"

    every: NonNegativeInt = 5
    clients: PositiveInt = 4
    samples: Annotated[int, at_least(2)] = 300

    def on_federation_start(self, run: Run) -> None:
        needs = "LatentSpace draws class priors, latent(x) and priors()"
        model = require_model(run, PriorModel, needs, "ACVAE")
        if model.priors()[0].shape[1] < 2:
            raise FlsuiteError(
                "LatentSpace draws two dimensions, and the latent space has one: raise "
                "model.latent_dim"
            )

    def on_round_end(self, run: Run, round: int) -> None:
        run.evaluator.load(run.federation.client_state(None))
        model: Any = run.evaluator.model  # a PriorModel
        means, log_variances = (t.detach().float().cpu() for t in model.priors())
        sigmas = (0.5 * log_variances).exp()
        for name, value in prior_distances(means, sigmas).items():
            run.log_metric(name, value)
        if self.every and is_due(run, self.every):
            self._draw(run, round, means.numpy(), sigmas.numpy())

    def _draw(self, run: Run, round: int, means: np.ndarray, sigmas: np.ndarray) -> None:
        from flsuite.analysis.latent import latent_figure

        federation, test = run.federation, run.federation.data.test
        rng = numpy_generator(run.options.seed, "latent")  # the same samples in every round
        rows = torch.from_numpy(rng.choice(len(test), min(self.samples, len(test)), replace=False))

        latents: dict[str, np.ndarray] = {}
        personal = federation.entries.personal
        for client in federation.present()[: self.clients] if personal else (None,):
            run.evaluator.load(federation.client_state(client))
            title = f"client {client}" if personal else "all clients"
            latents[title] = run.evaluator.latents(test.x[rows]).numpy()

        names = federation.data.spec.names
        figure = latent_figure(latents, test.y[rows].numpy(), means, sigmas, names)
        figure.suptitle(f"round {round}")
        run.log_picture("latent", figure)
        if run.folder.path is not None:
            path = run.folder.path / "latent" / f"round-{round:04d}.png"
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path)


def prior_distances(means: Tensor, sigmas: Tensor) -> dict[str, float]:
    """Return the smallest and mean distance between class centers, and the smallest deviation."""
    distances = torch.pdist(means)
    return {
        "prior_distance_min": float(distances.min()),
        "prior_distance_mean": float(distances.mean()),
        "prior_sigma_min": float(sigmas.min()),
    }


@dataclass(eq=False)
class ForestProbe(FederationCallback, Settings):
    """A random forest on each client's latent means.

    Take it to see what a latent space knows of the classes.

    It is trained on the client's training samples and scored on the global test split. The features
    do not use labels. Logged as ``test/probe_accuracy`` and ``test/probe_f1_macro``, means over the
    probed clients.

    Args:
        every: Rounds between two probes. The last round is always probed. Default: only the last
            round.
        clients: Number of clients to probe, starting with the first. Default: all.
        trees: Trees per forest.
        samples: Largest number of training samples per client, drawn at random.
    """

    affects: ClassVar[Affects] = "nothing"

    every: PositiveInt | None = None
    clients: PositiveInt | None = None
    trees: PositiveInt = 100
    samples: PositiveInt = 5000

    def on_federation_start(self, run: Run) -> None:
        needs = "ForestProbe probes a latent space, latent(x)"
        require_model(run, LatentModel, needs, "ACVAE")
        if run.federation.data.at(run.round).train.y.ndim > 1:
            raise FlsuiteError(
                "ForestProbe needs one class per sample, and this data has several labels; "
                "remove the callback"
            )

    def on_round_end(self, run: Run, round: int) -> None:
        if not is_due(run, self.every):
            return
        clients = run.federation.present()[: self.clients or None]
        accuracies, f1_scores = zip(*(self._probe(run, client) for client in clients), strict=True)
        run.log_metric("probe_accuracy", sum(accuracies) / len(clients), split="test")
        run.log_metric("probe_f1_macro", sum(f1_scores) / len(clients), split="test")

    def _probe(self, run: Run, client: int) -> tuple[float, float]:
        """Return accuracy and macro F1 on the test split, for a forest on this client's latents."""
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.metrics import accuracy_score, f1_score

        data, evaluator = run.federation.data.at(run.round), run.evaluator
        evaluator.load(run.federation.client_state(client))
        rows = data.train_rows(client)
        # Files are sorted by class, so the first rows would all be of one class.
        rng = numpy_generator(run.options.seed, "probe/rows", client=client)
        order = rng.permutation(len(rows))
        rows = rows[torch.from_numpy(order[: self.samples])]

        # scikit-learn accepts 32-bit seeds.
        seed = seed_for(run.options.seed, "probe", client=client) % 2**32
        forest = RandomForestClassifier(self.trees, random_state=seed)
        forest.fit(evaluator.latents(data.train.x[rows]).numpy(), data.train.y[rows].numpy())

        predicted = forest.predict(evaluator.latents(data.test.x).numpy())
        truth = data.test.y.numpy()
        f1 = f1_score(truth, predicted, average="macro", zero_division=0)
        return float(accuracy_score(truth, predicted)), float(f1)
