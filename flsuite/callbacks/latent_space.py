"""The latent space of the clients and their class priors, as pictures and as numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from flsuite.callbacks.base import Affects, FederationCallback
from flsuite.errors import FlsuiteError, require_at_least
from flsuite.models.protocols import PriorModel
from flsuite.random import numpy_generator
from flsuite.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LatentSpace", "latent_figure"]


class LatentSpace(FederationCallback):
    """Draws latent means with the class priors, and logs the distances between the priors.

    Logged in every round as ``train/<name>``: ``prior_distance_min`` and ``prior_distance_mean``
    over pairs of classes, ``prior_sigma_min``. The picture is written to ``latent/round-NNNN.png``
    in the run's folder, and sent to W&B. It has one panel per client. Its two axes are the first
    principal components of the class centres, along which the centres differ most.

    Args:
        every: Rounds between two pictures. The last round is always drawn. 0 draws none.
        clients: Number of panels, for the first clients.
        samples: Test samples per panel.
    """

    affects: ClassVar[Affects] = "nothing"

    def __init__(self, every: int = 5, clients: int = 4, samples: int = 300) -> None:
        self.every = every
        self.clients = clients
        self.samples = samples
        require_at_least("LatentSpace", 0, every=every)
        require_at_least("LatentSpace", 1, clients=clients)
        require_at_least("LatentSpace", 2, samples=samples)

    def on_federation_start(self, run: Run) -> None:
        if not isinstance(run.model, PriorModel):
            raise FlsuiteError(
                f"LatentSpace draws class priors, and {type(run.model).__name__} has none "
                "(latent(x) and priors()); use a model such as ACVAE, or remove the callback"
            )
        if run.model.priors()[0].shape[1] < 2:
            raise FlsuiteError(
                "LatentSpace draws two dimensions, and the latent space has one: raise "
                "model.latent_dim"
            )

    def on_round_end(self, run: Run, round: int) -> None:
        run.evaluator.load(run.federation.client_state(None))
        assert isinstance(run.model, PriorModel)
        means, sigmas = (t.detach().float().cpu() for t in prior_moments(run.model))
        for name, value in prior_distances(means, sigmas).items():
            run.log_metric(name, value)
        if self.every and (round % self.every == 0 or run.finished):
            self._draw(run, round, means.numpy(), sigmas.numpy())

    def _draw(self, run: Run, round: int, means: np.ndarray, sigmas: np.ndarray) -> None:
        federation, test = run.federation, run.federation.data.test
        rng = numpy_generator(run.seed, "latent")  # the same samples in every round
        rows = torch.from_numpy(rng.choice(len(test), min(self.samples, len(test)), replace=False))

        latents: dict[str, np.ndarray] = {}
        for client in range(min(self.clients, run.clients) if federation.personal else 1):
            run.evaluator.load(federation.client_state(client))
            title = f"client {client}" if federation.personal else "all clients"
            latents[title] = run.evaluator.latents(test.x[rows]).numpy()

        names = federation.data.spec.class_names or tuple(map(str, range(len(means))))
        figure = latent_figure(latents, test.y[rows].numpy(), means, sigmas, names)
        figure.suptitle(f"round {round}")
        if run.folder.path is not None:
            path = run.folder.path / "latent" / f"round-{round:04d}.png"
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path, dpi=120)
            _send(run, path, round)


def prior_moments(model: PriorModel) -> tuple[Tensor, Tensor]:
    """Return the means and the standard deviations of the classes, ``(classes, latent)`` each."""
    means, log_variances = model.priors()
    return means, (0.5 * log_variances).exp()


def prior_distances(means: Tensor, sigmas: Tensor) -> dict[str, float]:
    """Return the smallest and the mean distance of two class centres.

    The smallest standard deviation is added.
    """
    distances = torch.pdist(means)
    return {
        "prior_distance_min": float(distances.min()),
        "prior_distance_mean": float(distances.mean()),
        "prior_sigma_min": float(sigmas.min()),
    }


def latent_figure(
    latents: Mapping[str, np.ndarray],
    y: np.ndarray,
    means: np.ndarray,
    sigmas: np.ndarray,
    class_names: Sequence[str],
) -> "Figure":
    """Draw one panel per client.

    Samples are dots. Priors are crosses with an ellipse of one standard deviation.

    Args:
        latents: Title to ``(n, latent)``.
        y: int ``(n,)``.
        means: Class centres ``(classes, latent)``.
        sigmas: Their standard deviations.
        class_names: Names for the legend.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from sklearn.decomposition import PCA

    # Two centres span only a line, so the samples give the second axis.
    plane = PCA(2).fit(
        means if min(means.shape) > 2 else np.concatenate([means, *latents.values()])
    )

    figure = Figure(figsize=(3.3 * len(latents) + 1.6, 3.6), layout="constrained")
    panels = figure.subplots(1, len(latents), sharex=True, sharey=True, squeeze=False)[0]
    centres = plane.transform(means)
    angles = np.linspace(0, 2 * np.pi, 60)
    colors = colormaps["tab10" if len(class_names) <= 10 else "tab20"]
    circle = np.stack([np.cos(angles), np.sin(angles)])

    for panel, (title, points) in zip(panels, latents.items(), strict=True):
        projected = plane.transform(points)
        for c, name in enumerate(class_names):
            color = colors(c % 20)
            own = projected[y == c]
            panel.scatter(
                own[:, 0], own[:, 1], s=7, color=color, alpha=0.55, linewidths=0, label=name
            )

            covariance = plane.components_ @ np.diag(sigmas[c] ** 2) @ plane.components_.T
            # The prior projected to the plane. Rounding may leave a negative eigenvalue.
            values, vectors = np.linalg.eigh(covariance)
            ellipse = centres[c][:, None] + vectors @ (np.sqrt(values.clip(0))[:, None] * circle)

            panel.plot(*ellipse, color=color, linewidth=1)
            panel.scatter(
                *centres[c],
                marker="X",
                s=70,
                color=color,
                edgecolors="black",
                linewidths=0.7,
                zorder=3,
            )

        panel.set_title(title, fontsize=10)
        panel.set_aspect("equal")
        panel.spines[["top", "right"]].set_visible(False)

    figure.supxlabel("first principal component of the class centres", fontsize=8)
    figure.supylabel("second", fontsize=8)
    handles = panels[0].get_legend_handles_labels()[0]
    figure.legend(
        handles,
        [n[:18] for n in class_names],
        loc="outside right center",
        frameon=False,
        fontsize=7,
        markerscale=2,
    )
    return figure


def _send(run: Run, path: Path, round: int) -> None:
    for logger in run.loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.experiment.log({"latent": wandb.Image(str(path)), "round": round})
