"""The latent space of the clients and their class priors, as pictures and as numbers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.common.arguments import NonNegativeInt, PositiveInt, Settings, at_least
from flsuite.common.errors import FlsuiteError
from flsuite.common.random import numpy_generator
from flsuite.models.protocols import PriorModel
from flsuite.runs.run import Run


@dataclass(eq=False)
class LatentSpace(FederationCallback, Settings):
    """Draws latent means with the class priors, and logs the distances between the priors.

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
        model = run.evaluator.model
        if not isinstance(model, PriorModel):
            raise FlsuiteError(
                f"LatentSpace draws class priors, and {type(model).__name__} has none "
                "(latent(x) and priors()); use a model such as ACVAE, or remove the callback"
            )
        if model.priors()[0].shape[1] < 2:
            raise FlsuiteError(
                "LatentSpace draws two dimensions, and the latent space has one: raise "
                "model.latent_dim"
            )

    def on_round_end(self, run: Run, round: int) -> None:
        run.evaluator.load(run.federation.client_state(None))
        assert isinstance(run.evaluator.model, PriorModel)
        means, sigmas = (t.detach().float().cpu() for t in _prior_moments(run.evaluator.model))
        for name, value in prior_distances(means, sigmas).items():
            run.log_metric(name, value)
        if self.every and (round % self.every == 0 or run.finished):
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


def _prior_moments(model: PriorModel) -> tuple[Tensor, Tensor]:
    """Return the means and the standard deviations of the classes, ``(classes, latent)`` each."""
    means, log_variances = model.priors()
    return means, (0.5 * log_variances).exp()


def prior_distances(means: Tensor, sigmas: Tensor) -> dict[str, float]:
    """Return the smallest and mean distance between class centers, and the smallest deviation."""
    distances = torch.pdist(means)
    return {
        "prior_distance_min": float(distances.min()),
        "prior_distance_mean": float(distances.mean()),
        "prior_sigma_min": float(sigmas.min()),
    }
