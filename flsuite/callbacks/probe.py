"""What a latent space holds, whatever the model's own classifier makes of it."""

from typing import TYPE_CHECKING

import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import accuracy_score, f1_score

from flsuite.callbacks.base import FederationCallback
from flsuite.errors import FlsuiteError, require_at_least
from flsuite.random import numpy_generator, seed_for

if TYPE_CHECKING:
    from flsuite.trainer import FederatedTrainer

__all__ = ["ForestProbe"]


class ForestProbe(FederationCallback):
    """A random forest on each client's latent means, trained on its training samples and scored on the global test split.

    The features know no label, neither in training nor in test. Logged as ``test/probe_accuracy`` and
    ``test/probe_f1_macro``, means over the clients probed.

    Args:
        every: Rounds between two probes; default only the last round.
        clients: Probe the first clients; default all.
        trees: In a forest.
        samples: Training samples of a client at most, drawn at random.
    """

    def __init__(
        self,
        every: int | None = None,
        clients: int | None = None,
        trees: int = 100,
        samples: int = 5000,
    ) -> None:
        require_at_least(
            "ForestProbe", 1, every=every, clients=clients, trees=trees, samples=samples
        )
        self.every = every
        self.clients = clients
        self.trees = trees
        self.samples = samples

    def on_round_end(self, trainer: "FederatedTrainer", round: int) -> None:
        due = self.every is not None and round % self.every == 0
        if not due and round != trainer.rounds:
            return
        clients = range(min(self.clients or trainer.clients, trainer.clients))
        scores = [self.probe(trainer, client) for client in clients]
        for name, values in zip(
            ("probe_accuracy", "probe_f1_macro"), zip(*scores, strict=True), strict=True
        ):
            trainer.log_metric(name, sum(values) / len(values), split="test")

    def probe(self, trainer: "FederatedTrainer", client: int) -> tuple[float, float]:
        """Accuracy and macro F1 on the test split of a forest on this client's latent space."""
        federation, evaluator = trainer.federation, trainer.evaluator
        assert federation is not None
        data = federation.current
        if data.train.y.ndim > 1:
            raise FlsuiteError(
                "ForestProbe tells classes apart, and this data has several labels a sample; remove the callback"
            )
        evaluator.load(federation.client_state(client))
        rows = data.train_rows(client)
        order = numpy_generator(trainer.seed, "probe/rows", client=client).permutation(
            len(rows)
        )  # files are sorted by class
        rows = rows[torch.from_numpy(order[: self.samples])]
        forest = RandomForestClassifier(
            self.trees, random_state=seed_for(trainer.seed, "probe", client=client) % 2**32
        )
        forest.fit(evaluator.latents(data.train.x[rows]).numpy(), data.train.y[rows].numpy())
        found = forest.predict(evaluator.latents(data.test.x).numpy())
        truth = data.test.y.numpy()
        return float(accuracy_score(truth, found)), float(
            f1_score(truth, found, average="macro", zero_division=0)
        )
