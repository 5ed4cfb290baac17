"""Figures of a model's latent space and features, with priors and samples of a flow."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsuite.analysis.panels import (
    Color,
    class_colors,
    legend_outside,
    new_figure,
    panel_grid,
    tidy,
)
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import load_tensors

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from sklearn.decomposition import PCA


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
        latents: Latent means ``(n, latent)`` by panel title.
        y: Classes, int ``(n,)``.
        means: Class centers ``(classes, latent)``.
        sigmas: Standard deviations ``(classes, latent)``.
        class_names: Names for the legend.
    """
    from sklearn.decomposition import PCA

    # Two centers span only a line, so the samples add the second axis.
    plane = PCA(2).fit(
        means if min(means.shape) > 2 else np.concatenate([means, *latents.values()])
    )

    figure = new_figure(3.3 * len(latents) + 1.6, 3.6)
    panels = figure.subplots(1, len(latents), sharex=True, sharey=True, squeeze=False)[0]
    colors = class_colors(len(class_names))
    for panel, (title, points) in zip(panels, latents.items(), strict=True):
        _scatter_classes(panel, plane.transform(points), y, class_names)
        for color, mean, sigma in zip(colors, means, sigmas, strict=True):
            _draw_prior(panel, plane, mean, sigma, color)
        panel.set_title(title, fontsize=10)
        panel.set_aspect("equal")

    figure.supxlabel("first principal component of the class centers", fontsize=8)
    figure.supylabel("second", fontsize=8)
    _add_class_legend(figure, panels[0], class_names)
    return figure


def flow_figure(
    features: np.ndarray,
    y: np.ndarray,
    samples: np.ndarray,
    sampled_y: np.ndarray,
    class_names: Sequence[str],
) -> Figure:
    """Draw features next to samples from a flow of these features, in the same plane.

    The plane is spanned by the features' first principal components. If the flow is good, both
    panels look the same.

    Args:
        features: ``(n, features)``.
        y: Their classes, int ``(n,)``.
        samples: Samples from the flow, ``(m, features)``.
        sampled_y: The classes that they were drawn for, int ``(m,)``.
        class_names: Names for the legend.
    """
    from sklearn.decomposition import PCA

    plane = PCA(2).fit(features)
    figure, panels = panel_grid(2, (3.6, 3.6))
    shown = {"features of samples": (features, y), "drawn from the flow": (samples, sampled_y)}
    for panel, (title, (points, classes)) in zip(panels, shown.items(), strict=True):
        _scatter_classes(panel, plane.transform(points), classes, class_names)
        panel.set_title(title, fontsize=10)

    panels[1].sharex(panels[0])
    panels[1].sharey(panels[0])
    panels[0].autoscale()
    figure.supxlabel("first principal component of the features", fontsize=8)
    figure.supylabel("second", fontsize=8)
    _add_class_legend(figure, panels[0], class_names)
    return figure


def load_model(run_dir: str | Path) -> "LightningModule":
    """Return the global model of a finished run, on the CPU and in evaluation mode.

    Its private entries have their initial values, because clients keep their own.

    Raises:
        FlsuiteError: If the model is missing or damaged, or its class cannot be imported.
    """
    path = Path(run_dir) / "checkpoints" / "model.ckpt"
    remedy = "restore it, or resume the run with --ckpt_path last, which writes it at the end"
    content: dict[str, Any] = load_tensors(path, remedy)
    module, _, name = content["hyper_parameters"]["_class_path"].rpartition(".")
    try:
        model_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise FlsuiteError(
            f"the model of {run_dir} is a {module}.{name}, which cannot be imported; work in the "
            "folder that contains it, or install it"
        ) from error
    model: LightningModule = model_class.load_from_checkpoint(path, map_location="cpu")
    return model.eval()


def _scatter_classes(
    panel: Axes, points: np.ndarray, y: np.ndarray, class_names: Sequence[str]
) -> None:
    """Draw points ``(n, 2)`` as dots in the colors of their classes ``(n,)``."""
    colors = class_colors(len(class_names))
    for c, (name, color) in enumerate(zip(class_names, colors, strict=True)):
        x1, x2 = points[y == c].T
        panel.scatter(x1, x2, s=7, color=color, alpha=0.55, linewidths=0, label=name)
    tidy(panel, grid=None)


def _draw_prior(
    panel: Axes, plane: "PCA", mean: np.ndarray, sigma: np.ndarray, color: Color
) -> None:
    """Draw a diagonal Gaussian, projected to the plane: its center and one standard deviation."""
    covariance = plane.components_ @ np.diag(sigma**2) @ plane.components_.T
    # Rounding may leave a negative eigenvalue.
    values, vectors = np.linalg.eigh(covariance)
    angles = np.linspace(0, 2 * np.pi, 60)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    x, y = plane.transform(mean[None])[0]

    ellipse = np.array([[x], [y]]) + vectors @ (np.sqrt(values.clip(0))[:, None] * circle)
    panel.plot(*ellipse, color=color, linewidth=1)
    panel.scatter(x, y, marker="X", s=70, color=color, edgecolors="black", linewidths=0.7, zorder=3)


def _add_class_legend(figure: Figure, panel: Axes, class_names: Sequence[str]) -> None:
    handles, short = panel.get_legend_handles_labels()[0], [name[:18] for name in class_names]
    legend_outside(figure, "right center", handles, short, fontsize=7, markerscale=2)
