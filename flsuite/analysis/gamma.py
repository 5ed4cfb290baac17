"""A figure of gamma, the dissimilarity of the clients' gradients, and of its parts."""

import pandas as pd
from matplotlib.figure import Figure

from flsuite.analysis.curves import draw_band, label_axes, seed_curves
from flsuite.analysis.panels import by_experiment, legend_right, panel_grid
from flsuite.analysis.results import only, require_results
from flsuite.errors import FlsuiteError

GAMMA = {
    "gamma": "gamma",
    "gamma_relative": "gamma / ||mean gradient||²",
    "gamma_orig": "gamma at the plain input",
    "R": "R",
    "Phi": "Phi",
}
"""What :class:`~flsuite.callbacks.GradientDissimilarity` logs, and its name in figures."""


def gamma_figure(results: pd.DataFrame, x: str = "round") -> Figure:
    """Draw gamma and its parts, as far as they were logged, one panel each.

    Lines are means over seeds, and bands are their range.

    Args:
        results: What :func:`~flsuite.analysis.load` returns.
        x: The axis, as for :func:`~flsuite.analysis.curves_figure`.

    Raises:
        FlsuiteError: If no run has logged gamma.
    """
    parts = gamma_parts(results)
    if not parts:
        raise FlsuiteError(
            "gamma_figure: no run has logged gamma; add the callback GradientDissimilarity to "
            "trainer.callbacks"
        )
    figure, panels = panel_grid(len(parts), (3.8, 2.9))
    # Only fused models have all parts, and they must have one colour in all panels.
    colors = {label: f"C{n % 10}" for n, label in enumerate(by_experiment(results))}
    for panel, name in zip(panels, parts, strict=True):
        for label, rows in by_experiment(only(results, name, "train")).items():
            draw_band(panel, seed_curves(rows, x), label, x, color=colors.get(label))
        label_axes(panel, name, "train", x)
        panel.set_ylabel(GAMMA[name])
        if (only(results, name, "train")["value"] > 0).all():
            panel.set_yscale("log")
    if len(panels[0].lines) > 1:
        legend_right(figure, panels[0])
    return figure


def gamma_parts(results: pd.DataFrame) -> list[str]:
    """Return which of the numbers of :data:`GAMMA` any run has logged."""
    require_results(results)
    is_train = (results["split"] == "train") & (results["scope"] == "global")
    logged = set(results.loc[is_train, "metric"].unique())
    return [name for name in GAMMA if name in logged]
