"""A probe of a latent space, independent of the model's own classifier."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.arguments import PositiveInt, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator, seed_for
from flsuite.models.protocols import LatentModel
from flsuite.runs.run import Run


@dataclass(eq=False)
class ForestProbe(FederationCallback, Settings):
    """A random forest on each client's latent means.

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
        model = run.evaluator.model
        if not isinstance(model, LatentModel):
            raise FlsuiteError(
                f"ForestProbe probes a latent space, and {type(model).__name__} has none "
                "(latent(x)); use a model such as ACVAE, or remove the callback"
            )
        if run.federation.data.at(run.round).train.y.ndim > 1:
            raise FlsuiteError(
                "ForestProbe needs one class per sample, and this data has several labels; "
                "remove the callback"
            )

    def on_round_end(self, run: Run, round: int) -> None:
        is_due = self.every is not None and round % self.every == 0
        if not is_due and not run.finished:
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
