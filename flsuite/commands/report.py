"""``flsuite report``: a comparison of finished runs."""

import argparse
import math
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from flsuite.analysis.axes import AXES
from flsuite.analysis.groups import Group, find_runs, group_runs, seed_of
from flsuite.analysis.report import (
    report_figure,
    report_markdown,
    report_table,
    require_score,
)
from flsuite.analysis.target import first_to_target, target_cell, target_title
from flsuite.errors import FlsuiteError
from flsuite.files import make_folder

__all__ = ["report"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise FlsuiteError(f"report: {message}; see flsuite report --help")


def report(args: list[str]) -> None:
    """Print the table of the runs.

    With ``--output``, the table and a picture are written too.
    """
    parser = _Parser(prog="flsuite report", add_help=False)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--metric", nargs="+", default=["accuracy"])
    parser.add_argument("--last", type=int, default=10)
    parser.add_argument("--x", choices=list(AXES), default="round")
    parser.add_argument("--split", choices=["test", "val"], default="test")
    parser.add_argument("--target", type=float)
    parser.add_argument("--output")
    request = parser.parse_args(args)
    if request.last < 1:
        raise FlsuiteError(f"report: --last must be at least 1, got {request.last}")
    if request.target is not None and not math.isfinite(request.target):
        raise FlsuiteError(f"report: --target must be a finite number, got {request.target}")

    groups = group_runs(find_runs(request.folders))
    for metric in request.metric:
        require_score(groups, metric, request.split)
    target = {"target": request.target, "x": request.x, "split": request.split}
    table = report_table(groups, request.metric, request.last, **target)

    console = Console()
    for metric in request.metric:
        rows = table[table["metric"] == metric]
        console.print(_shown(rows, metric, request.last))
        if request.target is not None:
            _print_target(console, rows, metric, request)
    for warning in (*uneven(groups), *repeated(groups), *measured(groups, request.x)):
        console.print(warning)

    if request.output:
        folder = make_folder(Path(request.output))
        table.to_csv(folder / "report.csv", index=False)
        for metric in request.metric:
            for warning in apart(groups, metric, request.split, request.x):
                console.print(warning)
        (folder / "report.md").write_text(report_markdown(table, request.last, **target))
        picture = report_figure(groups, request.metric, **target)
        picture.savefig(folder / "report.png", dpi=150)
        print(f"{folder}/report.csv\n{folder}/report.md\n{folder}/report.png")


def _shown(table: pd.DataFrame, metric: str, last: int) -> Table:
    """Return the table for a terminal of 80 characters."""
    shown = Table(title=f"test {metric}, mean and spread over runs", title_justify="left")
    shown.add_column("what differs", overflow="fold", min_width=14)
    for heading in ("runs", "last", "picked", f"last {last}", "best on test"):
        shown.add_column(heading, justify="right", overflow="fold")

    for line in report_markdown(table, last).splitlines()[2:]:
        label, _, *numbers = (
            cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")
        )
        shown.add_row(label, *(number.replace(" ", "") for number in numbers))

    shown.caption = (
        f"picked: in the round best on validation; last {last}: mean; "
        "best on test: no honest choice"
    )
    return shown


def _print_target(
    console: Console, rows: pd.DataFrame, metric: str, request: argparse.Namespace
) -> None:
    """Print how soon the groups reach the target, and which one is the first.

    It is a table of its own, because both do not fit side by side into 80 characters.
    """
    shown = Table()
    shown.add_column("what differs", overflow="fold", min_width=14)
    title = target_title(request.target, request.x, request.split, metric)
    shown.add_column(title, justify="right", overflow="fold")
    for row in rows.to_dict("records"):
        shown.add_row(row["group"], target_cell(row, request.x))
    console.print(shown)

    line = first_to_target(rows, metric, request.target, request.x, request.split)
    if line:
        print(line)


def uneven(groups: list[Group]) -> list[str]:
    """Return a line for each run that ended before the others.

    The rows of such runs do not match those of the others, unless all have spent the same budget of
    client updates or virtual seconds: rounds may differ in size.
    """
    if _share_budget(groups, "max_client_updates", "client_updates") or _share_budget(
        groups, "max_virtual_seconds", "virtual_s"
    ):
        return []
    ends = {
        folder: int(table["round"].max())
        for group in groups
        for folder, table in group.runs.items()
    }
    most = max(ends.values())
    return [
        f"{folder} ends with round {end} of {most}" for folder, end in ends.items() if end < most
    ]


def _share_budget(groups: list[Group], setting: str, column: str) -> bool:
    """Return whether all runs have the same limit and have reached it."""
    limit = groups[0].settings.get(setting)
    is_common = limit is not None and all(g.settings.get(setting) == limit for g in groups)
    ends = [table[column].max() for group in groups for table in group.runs.values()]
    return is_common and min(ends) >= limit


def measured(groups: list[Group], x: str) -> list[str]:
    """Return a line for each group whose virtual seconds cannot be compared."""
    if x != "virtual_s":
        return []
    return [
        f"{group.label}: its virtual seconds were measured on the machine; compare it with others "
        "of the same trainer.schedule.speeds"
        for group in groups
        if _is_measured(group)
    ]


def _is_measured(group: Group) -> bool:
    schedule = str(group.settings.get("schedule", ""))
    speeds = group.settings.get("schedule.speeds")
    # A synchronous round without speeds takes as long as on this machine.
    is_open = speeds is None and schedule.endswith("Synchronous") and "Asyn" not in schedule
    return is_open or str(speeds).endswith("Measured")


def apart(groups: list[Group], metric: str, split: str, x: str) -> list[str]:
    """Return a line for each group whose runs have no part of the axis in common.

    The picture has no curve of such a group.
    """
    return [
        f"{group.label}: its runs have no {x} of {split} {metric} in common; it is not drawn"
        for group in groups
        if group.curves(metric, split, x).empty
    ]


def repeated(groups: list[Group]) -> list[str]:
    """Return a line for each group in which a seed appears more than once."""
    found = []
    for group in groups:
        seeds = [seed_of(folder) for folder in group.runs]
        twice = sorted({str(seed) for seed in seeds if seed is not None and seeds.count(seed) > 1})
        found += (
            [f"{group.label}: seed {', '.join(twice)} more than once; the spread is too small"]
            if twice
            else []
        )
    return found
