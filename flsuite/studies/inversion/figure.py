"""A figure of real images and their reconstructions."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor

from flsuite.common.errors import require_at_least


def reconstruction_figure(rows: Mapping[str, Tensor], columns: int = 12) -> Figure:
    """Draw images in labeled rows.

    Args:
        rows: Label to images within [0, 1], ``(n, channels, height, width)``. A label may have
            several lines.
        columns: Maximum number of images per row.
    """
    require_at_least("reconstruction_figure", 1, columns=columns)
    shown = {label: images[:columns].detach().cpu() for label, images in rows.items()}
    columns = max(len(images) for images in shown.values())
    size = 2.4 + 0.62 * columns, 0.72 * len(shown)
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    # The labels have their own column.
    panels = figure.subplots(
        len(shown), 1 + columns, squeeze=False, width_ratios=[4] + [1] * columns
    )

    for (label, images), line in zip(shown.items(), panels, strict=True):
        for panel in line:
            panel.axis("off")
        line[0].text(0, 0.5, label, va="center", fontsize=9)
        for panel, image in zip(line[1:], images, strict=False):
            # Draw gray images dark on white, like ink.
            if len(image) == 1:
                panel.imshow(image[0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            else:
                panel.imshow(image.permute(1, 2, 0).numpy())
    return figure
