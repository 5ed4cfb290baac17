"""Figures with several panels, their axes, and common ways to draw in them."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

Name = TypeVar("Name", bound=Hashable)


class Axis(NamedTuple):
    """A column of ``metrics.csv`` as an axis.

    Attributes:
        label: The axis label in pictures.
        unit: The unit of a value, in the plural.
        scale: Factor from a value of the column to this unit.
        is_whole: Whether all values are whole numbers.
    """

    label: str
    unit: str
    scale: float = 1.0
    is_whole: bool = False

    def amount(self, value: float) -> str:
        """Return a value of the column as text with its unit."""
        number = self.number(value)
        is_one = number == "1" and self.is_whole
        return f"{number} {self.unit.removesuffix('s') if is_one else self.unit}"

    def number(self, value: float) -> str:
        """Return a value of the column as text, with three digits or more before the point."""
        scaled = value * self.scale
        return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


AXES = {
    "round": Axis("round", "rounds", is_whole=True),
    "virtual_s": Axis("virtual seconds", "virtual s"),
    "wall_s": Axis("seconds", "s"),
    "client_updates": Axis("client updates", "client updates", is_whole=True),
    "bytes": Axis("MB sent and received", "MB", scale=1e-6),
}


def aligned(curves: Mapping[Name, pd.Series], x: str) -> pd.DataFrame:
    """Return the curves of runs as columns of one table.

    Runs share their rounds, but not their points on other axes. On these, the rows are the points
    of all curves in the range that every curve covers. A curve's value at a row is its last one at
    or before that point.
    """
    if x == "round":
        return pd.DataFrame(dict(curves))

    # If a point has several values, such as updates that arrive together, the last one counts.
    curves = {
        name: curve[~curve.index.duplicated(keep="last")].sort_index()
        for name, curve in curves.items()
    }
    covered = [curve.index for curve in curves.values() if len(curve)]
    first = max((points[0] for points in covered), default=0.0)
    last = min((points[-1] for points in covered), default=0.0)

    points = sorted({point for points in covered for point in points if first <= point <= last})
    shared = pd.Index(points, dtype=float)
    return pd.DataFrame(
        {name: curve.reindex(shared, method="ffill") for name, curve in curves.items()},
        index=shared,
    )


Color = tuple[float, float, float, float]  # red, green, blue, opacity

_DPI = 150  # sharp on a screen and in a paper


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches, without pyplot."""
    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG, and as PDF for a paper, and return both files.

    The PDF embeds its fonts as TrueType, because publishers refuse matplotlib's default (Type 3).
    Its bytes do not depend on the time.
    """
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    with rc_context({"pdf.fonttype": 42}):
        figure.savefig(paths[0])
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def grid_shape(number: int) -> tuple[int, int]:
    """Return the rows and columns of a grid of panels: three per row, but two rows of two."""
    columns = 2 if number == 4 else max(1, min(number, 3))
    return max(1, -(-number // columns)), columns


def panel_grid(
    number: int, size: tuple[float, float], shares_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels of a size in inches, see :func:`grid_shape`.

    Panels may share the range of their vertical axes.
    """
    rows, columns = grid_shape(number)
    figure = new_figure(size[0] * columns + 0.6, size[1] * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=shares_y).ravel().tolist()
    for unused in panels[number:]:
        unused.remove()
    return figure, panels[:number]


def by_experiment(results: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each method and partition, keyed by a title for them."""
    several = results["partition"].nunique() > 1
    return {
        f"{method}, {partition}" if several else str(method): rows
        for (method, partition), rows in results.groupby(["method", "partition"], observed=True)
    }


def legend_right(figure: Figure, panel: Axes) -> None:
    """Add the legend of a panel to the right of all panels, which become no narrower."""
    figure.set_figwidth(figure.get_figwidth() + 2.4)
    legend_outside(figure, "right center", *panel.get_legend_handles_labels())


def legend_outside(
    figure: Figure,
    place: str,
    handles: Sequence[Artist],
    labels: Sequence[str] | None = None,
    fontsize: int = 8,
    **style: Any,
) -> None:
    """Add a legend outside of all panels, where it does not cover anything.

    Args:
        figure: The figure.
        place: ``right center`` or ``lower center``.
        handles: What the legend explains.
        labels: Texts. Default: the labels of the handles.
        fontsize: Size of the texts.
        style: Further arguments of :meth:`matplotlib.figure.Figure.legend`.
    """
    style = {"loc": f"outside {place}", "frameon": False, "fontsize": fontsize, **style}
    figure.legend(handles=handles, labels=labels, **style)


def tidy(panel: Axes, grid: Literal["both", "x", "y"] | None = "both") -> None:
    """Remove the frame at the top and at the right of a panel, and add a pale grid."""
    if grid is not None:
        panel.grid(axis=grid, alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def class_colors(number: int) -> list[Color]:
    """Return a color per class. With more than 20 classes, colors repeat."""
    palette = colormaps["tab10" if number <= 10 else "tab20"]
    return [palette(c % 20) for c in range(number)]


def color_range(scores: pd.Series) -> tuple[float, float]:
    """Return the scores with the first and the last color of a heat map.

    Scores in [0, 1] have the same colors in every figure.
    """
    return (0.0, 1.0) if scores.between(0, 1).all() else (scores.min(), scores.max())


def draw_matrix(
    panel: Axes, matrix: pd.DataFrame, low: float = 0.0, high: float = 1.0, most: int = 12
) -> AxesImage:
    """Draw numbers as blue cells, and return the image.

    NaN cells stay empty. Numbers are left out if they would not fit.

    Args:
        panel: The panel to draw in.
        matrix: The numbers.
        low: The number with the palest color.
        high: The number with the darkest color.
        most: Maximum number of rows or columns for which numbers are written.
    """
    image = panel.imshow(matrix.to_numpy(), vmin=low, vmax=high, cmap="Blues", aspect="auto")
    rows, columns = matrix.shape
    is_small = max(rows, columns) > most
    has_diagonal = list(matrix.index) == list(matrix.columns)
    for i, row in enumerate(matrix.to_numpy().tolist()):
        for j, value in enumerate(row):
            if value != value or (is_small and i != j):
                continue
            panel.text(
                j,
                i,
                f"{value:.{1 if is_small else 2}f}",
                ha="center",
                va="center",
                fontsize=6 if is_small else 8,
                color="white" if value - low > 0.6 * (high - low) else "black",
                weight="bold" if has_diagonal and i == j else "normal",
            )
    step_x, step_y = -(-columns // 25), -(-rows // 25)
    panel.set_xticks(range(0, columns, step_x), [str(name) for name in matrix.columns[::step_x]])
    panel.set_yticks(range(0, rows, step_y), [str(name) for name in matrix.index[::step_y]])
    return image


def matrices_figure(
    matrices: Mapping[str, pd.DataFrame], size: tuple[float, float], x: str, y: str, **bar: Any
) -> Figure:
    """Draw matrices of shares by title, one panel each, with a color bar for all.

    Args:
        matrices: The matrices.
        size: The size of a panel in inches.
        x: What the columns are.
        y: What the rows are.
        bar: Arguments of the color bar.
    """
    figure, panels = panel_grid(len(matrices), size)
    for panel, (title, matrix) in zip(panels, matrices.items(), strict=True):
        image = draw_matrix(panel, matrix)
        panel.set(xlabel=x, ylabel=y)
        panel.set_title(title, fontsize=10)
    figure.colorbar(image, ax=panels, **bar)
    return figure


def draw_client_rounds(
    panel: Axes, scores: pd.DataFrame, low: float | None = None, high: float | None = None
) -> AxesImage:
    """Draw the scores of clients (rows) over rounds (columns) as a heat map, and return the image.

    Missing scores stay empty. Each evaluation is a column, because rounds may have gaps.

    Args:
        panel: The panel to draw in.
        scores: The scores.
        low: Score with the darkest color. Default: the lowest score.
        high: Score with the brightest color. Default: the highest score.
    """
    image = panel.imshow(
        scores, vmin=low, vmax=high, aspect="auto", cmap="viridis", interpolation="nearest"
    )
    step = -(-scores.shape[1] // 8)
    panel.set_xticks(
        range(0, scores.shape[1], step), [str(round) for round in scores.columns[::step]]
    )
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set(xlabel="round", ylabel="client")
    return image
