"""Figures of a model's latent space and features, with priors and samples of a flow."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from flsuite.analysis.panels import panel_grid
from flsuite.errors import FlsuiteError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["flow_figure", "latent_figure", "load_model"]


def latent_figure(
    latents: Mapping[str, np.ndarray],
    y: np.ndarray,
    means: np.ndarray,
    sigmas: np.ndarray,
    class_names: Sequence[str],
) -> Figure:
    """Draw one panel per client.

    Samples are dots. Priors are crosses with an ellipse of one standard deviation.

    Args:
        latents: Title to ``(n, latent)``.
        y: int ``(n,)``.
        means: Class centres ``(classes, latent)``.
        sigmas: Their standard deviations.
        class_names: Names for the legend.
    """
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


def flow_figure(
    features: np.ndarray,
    y: np.ndarray,
    samples: np.ndarray,
    sampled_y: np.ndarray,
    class_names: Sequence[str],
) -> Figure:
    """Draw features beside samples of a flow of these features, in the same plane.

    The plane is that of the features' first principal components. Where the flow is good, both
    panels look the same.

    Args:
        features: ``(n, features)``.
        y: Their classes, int ``(n,)``.
        samples: Samples of the flow, ``(m, features)``.
        sampled_y: The classes that they were drawn for, int ``(m,)``.
        class_names: Names for the legend.
    """
    from sklearn.decomposition import PCA

    plane = PCA(2).fit(features)
    figure, panels = panel_grid(2, (3.6, 3.6))
    shown = {"features of samples": (features, y), "drawn from the flow": (samples, sampled_y)}
    colors = colormaps["tab10" if len(class_names) <= 10 else "tab20"]
    for panel, (title, (points, classes)) in zip(panels, shown.items(), strict=True):
        projected = plane.transform(points)
        for c, name in enumerate(class_names):
            own = projected[classes == c]
            panel.scatter(
                own[:, 0],
                own[:, 1],
                s=7,
                color=colors(c % 20),
                alpha=0.55,
                linewidths=0,
                label=name,
            )
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)

    panels[1].sharex(panels[0])
    panels[1].sharey(panels[0])
    panels[0].autoscale()
    figure.supxlabel("first principal component of the features", fontsize=8)
    figure.supylabel("second", fontsize=8)
    handles = panels[0].get_legend_handles_labels()[0]
    figure.legend(
        handles,
        [name[:18] for name in class_names],
        loc="outside right center",
        frameon=False,
        fontsize=7,
        markerscale=2,
    )
    return figure


def load_model(run_dir: str | Path) -> "LightningModule":
    """Return the global model of a finished run, on the CPU and in evaluation mode.

    Its private entries have their initial values, because they lie with the clients.

    Raises:
        FlsuiteError: If the run has left no model, or its class cannot be imported.
    """
    import torch

    path = Path(run_dir) / "checkpoints" / "model.ckpt"
    if not path.is_file():
        raise FlsuiteError(
            f"there is no {path}: a run writes its model at its end; finish the run with "
            "--ckpt_path last"
        )
    content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    module, _, name = content["hyper_parameters"]["_class_path"].rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FlsuiteError(
            f"the model of {run_dir} is a {module}.{name}, which cannot be imported; work in the "
            "folder that holds it, or install it"
        ) from error
    model: LightningModule = found.load_from_checkpoint(path, map_location="cpu")
    return model.eval()
