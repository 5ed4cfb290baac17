"""FusedSpaceFed scored before and after its encoders are re-aligned.

A run scores a client with the encoder of its last fit and the decoder of the last aggregation. The
encoder is not yet aligned to this decoder, which the warm-up of the next round would do. Name the
callback in a config or on the command line:
``--trainer.callbacks+ flsuite.studies.realignment.Realignment``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flsuite.callbacks.base import Affects, FederationCallback, require_model
from flsuite.common.arguments import NonNegativeInt, Settings
from flsuite.data.loader import TrainLoader
from flsuite.metrics.scores import scores
from flsuite.models.fusedspacefed import FusedSpaceFed, reconstruction_error
from flsuite.runs.run import Run


@dataclass(eq=False)
class Realignment(FederationCallback, Settings):
    """Scores all clients' models after a warm-up of their encoders, at the end of a run.

    The mean over the clients' models on the whole test split is logged as
    ``test/realigned_<epochs>/accuracy``. The learning rate is the model's own, without a decay over
    the rounds.

    Args:
        epochs: Lengths of the warm-up in epochs. 0 gives the run's own score.
    """

    affects: ClassVar[Affects] = "nothing"

    epochs: Sequence[NonNegativeInt] = (1, 3)

    def on_federation_start(self, run: Run) -> None:
        needs = "Realignment re-aligns the encoders of fused models"
        require_model(run, FusedSpaceFed, needs, "FusedSpaceFed")

    def on_round_end(self, run: Run, round: int) -> None:
        if not run.finished:
            return
        clients = range(run.federation.data.clients)
        for epochs in self.epochs:
            total = sum(_accuracy_after(run, client, epochs) for client in clients)
            run.log_metric(f"realigned_{epochs}/accuracy", total / len(clients), split="test")


def _accuracy_after(run: Run, client: int, epochs: int) -> float:
    """Return the accuracy of a client's model on the test split after a warm-up."""
    data = run.federation.data.at(run.round)
    run.evaluator.load(run.federation.client_state(client))
    loader = TrainLoader(data, client, run.options.seed, run.round + 1)
    _warm_up(run.evaluator.model, loader, epochs)
    outputs = run.evaluator.outputs(data.test)
    return scores(outputs, data.test.y, data.spec, auroc=False)["accuracy"]


def _warm_up(model: Any, loader: TrainLoader, epochs: int) -> None:
    own = list(model.encoder.parameters())
    optimizer = torch.optim.SGD(
        own, lr=model.autoencoder_lr, momentum=model.momentum, weight_decay=model.weight_decay
    )
    model.train()
    model.decoder.eval()  # its statistics are the aggregate's
    for _ in range(epochs):
        for x, _ in loader:
            x = x.to(model.device)
            loss = reconstruction_error(model.reconstruct(x), x).mean()
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
