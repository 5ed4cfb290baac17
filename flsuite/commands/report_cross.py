"""``flsuite report --rows --columns``: cross tables of finished runs."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flsuite.analysis.cross import cross_figure, cross_markdown, cross_matrices, cross_table
from flsuite.analysis.groups import Group
from flsuite.analysis.listing import repeated, uneven
from flsuite.common.files import csv_of, make_folder, replace_text


def report_cross(
    groups: Sequence[Group],
    rows: str,
    columns: str,
    metrics: Sequence[str],
    output: str | None,
    notes: Sequence[str],
) -> None:
    """Print scores by two settings, and write them with heat maps to ``output`` if given."""
    table, console = cross_table(groups, rows, columns, metrics), Console()
    for metric in metrics:
        for panel, matrix in cross_matrices(table, metric).items():
            console.print(_shown(matrix, ", ".join(filter(None, [f"test {metric}", panel]))))
    least, most = table["runs"].min(), table["runs"].max()
    console.print(
        f"last round, means; runs per cell: {most if least == most else f'{least} to {most}'}\n"
        "spreads, and the round picked on validation: --output FOLDER"
    )
    for line in [*notes, *uneven(groups), *repeated(groups)]:
        console.print(line)
    if output:
        _write(table, metrics, make_folder(Path(output)))


def _shown(matrix: pd.DataFrame, title: str) -> Table:
    """Return a panel as a table. Nine columns of scores fit in 80 characters."""
    cells = matrix.map(lambda value: "" if pd.isna(value) else f"{value:.3f}")
    shown = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1)
    )
    shown.add_column("", overflow="fold")
    for column in cells:
        # As narrow as the numbers: rich would cut off the last column to fit long headings.
        width = max(5, cells[column].str.len().max())
        shown.add_column(str(column), justify="right", overflow="fold", width=width)
    for name, row in cells.iterrows():
        shown.add_row(str(name), *row)
    return shown


def _write(table: pd.DataFrame, metrics: Sequence[str], folder: Path) -> None:
    replace_text(csv_of(table), folder / "cross.csv")
    (folder / "cross.md").write_text(cross_markdown(table), encoding="utf-8")
    written = ["cross.csv", "cross.md"]
    for metric in metrics:
        name = f"cross-{metric.replace('/', '-')}.png"
        cross_figure(table, metric).savefig(folder / name)
        written.append(name)
    print("\n".join(f"{folder}/{name}" for name in written))
