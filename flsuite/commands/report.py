"""``flsuite report``: a comparison of finished runs."""

import argparse
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flsuite.analysis.comparison import (
    PAIR_HEADINGS,
    compare,
    comparison_markdown,
    comparison_note,
    default_score,
    pair_cells,
)
from flsuite.analysis.cross import cross_figure, cross_markdown, cross_matrices, cross_table
from flsuite.analysis.curves import MOST_SCORES, curves_figure
from flsuite.analysis.groups import Group, find_runs, group_runs
from flsuite.analysis.latex import latex_table
from flsuite.analysis.listing import (
    apart,
    finished,
    measured,
    own_models,
    own_models_notes,
    repeated,
    undefined,
    uneven,
)
from flsuite.analysis.panels import AXES, save_figure
from flsuite.analysis.publish.page.page import PageRequest, require_page, write_page
from flsuite.analysis.ranking import Ranks, ranks, ranks_figure
from flsuite.analysis.report import (
    amount_cell,
    averaged_text,
    default_metrics,
    first_to_target,
    report_markdown,
    report_table,
    require_score,
    score_cell,
    score_titles,
    target_markdown,
    target_table,
)
from flsuite.analysis.results import Results, results_of
from flsuite.analysis.runs import read_tuning
from flsuite.analysis.sequential import stopping_of
from flsuite.commands.parsers import parser_of
from flsuite.common.arguments import PositiveInt, require
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import csv_of, make_folder, plain_rows, replace_text
from flsuite.common.score_names import lower_is_better, shown_number, shown_score, text_table


def report(args: list[str]) -> dict[str, Any]:
    """Print the tables of the runs, and return them for other programs.

    ``--output`` also writes them and a picture to files, and ``--html`` writes a page. ``--rows``
    and ``--columns`` print cross tables instead.
    """
    request = _parse(args)
    if request.html:
        require_page()
        if Path(request.html).is_dir():
            raise FlsuiteError(f"report: --html {request.html} is a folder; name a file in it")
    groups, left_out = finished(group_runs(find_runs(request.folders)))
    if not request.metric:
        # A target is a value of one score, and a cross table has one score per cell.
        most = 1 if request.rows or request.target is not None else MOST_SCORES
        request.metric = default_metrics(groups, ["test", request.split], most)
    if request.rows:
        return _print_cross(request, groups, left_out)
    for metric in request.metric:
        require_score(groups, metric, request.split)
    tables, console = _tables_of(request, groups, left_out), Console()
    _print_tables(request, tables, console)
    if request.output:
        _write(request, tables, console)
    if request.html:
        path = Path(request.html)
        make_folder(path.parent)
        page = PageRequest(
            request.metric, request.last, request.split, request.x, request.target, request.against
        )
        write_page(path, groups, page, tables.tuning, tables.notes)
        print(path)
    if request.wandb:
        from flsuite.analysis.publish.wandb_charts import send_report

        send_report(request.wandb, request.metric[0], _markdown(request, tables))
    return {
        "scores": plain_rows(tables.scores),
        "pairs": plain_rows(_joined(tables.pairs)),
        "targets": plain_rows(_joined(tables.targets)),
        "tuning": [] if tables.tuning is None else plain_rows(tables.tuning),
        "notes": tables.notes,
    }


@dataclass(frozen=True)
class _Tables:
    """The content of a report on the requested scores.

    Attributes:
        groups: The runs, by method and partition.
        results: The same runs, as one table.
        scores: The scores.
        targets: When the methods reach the target, by score.
        pairs: The paired differences, by score.
        ranks: The ranks of the methods, by score.
        tuning: The budget of the tuning, if there was any.
        stopping: How sweeps that add seeds were stopped.
        marked: The groups and scores with a star, which are of many models.
        stars: What the stars say.
        notes: All lines below the tables, ``stopping`` and ``stars`` included.
    """

    groups: Sequence[Group]
    results: Results
    scores: pd.DataFrame
    targets: dict[str, pd.DataFrame]
    pairs: dict[str, pd.DataFrame]
    ranks: dict[str, Ranks]
    tuning: pd.DataFrame | None
    stopping: list[str]
    marked: set[tuple[str, str]]
    stars: list[str]
    notes: list[str]


def _tables_of(
    request: argparse.Namespace, groups: Sequence[Group], left_out: Sequence[str]
) -> _Tables:
    """Return the tables of the requested scores, and the lines below them."""
    metrics, split, results = request.metric, request.split, results_of(groups)
    targets: dict[str, pd.DataFrame] = {}
    if request.target is not None:
        targets = {m: target_table(results, request.target, m, split) for m in metrics}
    stopping, marked = stopping_of(request.folders), own_models(groups, metrics, split)
    stars = own_models_notes(groups, marked, split)
    notes = [*stopping, *left_out, *uneven(groups), *repeated(groups), *measured(groups, request.x)]
    return _Tables(
        groups=groups,
        results=results,
        scores=report_table(groups, metrics, request.last),
        targets=targets,
        pairs={m: compare(results, m, against=request.against) for m in metrics},
        ranks=_ranked(results, metrics),
        tuning=read_tuning(request.folders),
        stopping=stopping,
        marked=marked,
        stars=stars,
        notes=[*notes, *undefined(groups, metrics), *stars],
    )


def _print_tables(request: argparse.Namespace, tables: _Tables, console: Console) -> None:
    """Print the tables, score by score, and the lines below them."""
    groups, metrics = tables.groups, request.metric
    if len(groups) == 1 and len(metrics) > 1:
        console.print(_shown(tables.scores))
    for metric in metrics:
        rows = tables.scores[tables.scores["metric"] == metric]
        if len(groups) > 1 or len(metrics) == 1:
            console.print(_shown(rows, tables.marked))
        if metric in tables.targets:
            _print_target(console, tables.targets[metric], _goal(metric, request), request.x)
        _print_comparison(console, tables.pairs[metric], tables.results, metric)
    for metric, own in tables.ranks.items():
        console.print(own.line(metric))
    if tables.tuning is not None:
        names = ["method", "grid point", "values", "trials", "score"]
        headings = ["method", "grid point", "chosen", "trials", "score"]
        rows = tables.tuning[names].astype(str).to_numpy().tolist()
        title = "budget of the tuning, on validation data"
        console.print(text_table(title, headings, rows, words=3, **_BOLD))
    for line in tables.notes:
        console.print(line)


def _joined(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of all scores as one, with the score's name."""
    parts = [own.assign(metric=name) for name, own in tables.items() if len(own)]
    return pd.concat(parts) if parts else pd.DataFrame()


def _goal(metric: str, request: argparse.Namespace) -> str:
    return f"{request.split} {shown_score(metric)} {request.target:g}"


def _markdown(request: argparse.Namespace, tables: _Tables) -> str:
    """Return the scores, and when they reach the target."""
    pages = [target_markdown(own, _goal(metric, request)) for metric, own in tables.targets.items()]
    return "\n".join([report_markdown(tables.scores, tables.marked, tables.stars), *pages])


def _parse(args: list[str]) -> argparse.Namespace:
    request = parser_of("report").parse_args(args)
    if (request.rows is None) != (request.columns is None):
        raise FlsuiteError(
            "report: --rows and --columns go together, e.g. --rows aggregator --columns attack"
        )
    require("report", PositiveInt | None, **{"--last": request.last})
    if request.target is not None and not math.isfinite(request.target):
        raise FlsuiteError(f"report: --target must be a finite number, got {request.target}")
    return request


_PLAIN: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "show_edge": False}
_BOLD: dict[str, Any] = {"box": HEAVY_HEAD, "show_edge": False}


def _shown(table: pd.DataFrame, marked: Collection[tuple[str, str]] = ()) -> Table:
    """Return the scores of one metric or one experiment as a table.

    Args:
        table: The rows.
        marked: The groups and scores with a star.
    """
    metrics, averaged = table["metric"].unique(), averaged_text(table)
    is_single = len(metrics) == 1
    scores, first = (shown_score(metrics[0]), "what differs") if is_single else ("scores", "score")
    rows = []
    for row in table.to_dict("records"):
        label = row["group"] if is_single else shown_score(row["metric"])
        label += " *" if (row["group"], row["metric"]) in marked else ""
        numbers = (score_cell(row, name).replace(" ", "") for name in score_titles(table))
        rows.append((label, str(row["runs"]), *numbers))

    mean = f"{averaged}: mean; " if averaged else ""
    caption = f"picked: in the round best on validation; {mean}best on test: no honest choice"
    headings = filter(None, (first, "runs", "last", "picked", averaged, "best on test"))
    title = f"test {scores}, mean and spread over runs"
    shown = text_table(title, headings, rows, caption=caption, **_BOLD)
    shown.columns[0].min_width = 14
    return shown


def _print_target(console: Console, table: pd.DataFrame, goal: str, x: str) -> None:
    """Print when the experiments reach the target on every axis, and which one is first.

    It is a separate table, because both do not fit side by side in 80 characters.
    """
    headings = ["method", *(axis.unit for axis in AXES.values()), "reached"]
    for title, own in _by_partition(table, f"to {goal}: means of runs that reach it"):
        rows = []
        for row in own.to_dict("records"):
            # There is room for the spread of one axis only, the requested one.
            amounts = [amount_cell(row, n, spread=n == x).replace(" ", "") for n in AXES]
            rows.append((row["method"], *amounts, f"{row['reached']} of {row['runs']}"))
        console.print(text_table(title, headings, rows, **_PLAIN))

    if line := first_to_target(table, goal, x):
        print(line)


def _print_comparison(console: Console, table: pd.DataFrame, results: Results, metric: str) -> None:
    """Print the paired differences, if any two methods share two seeds."""
    if not (table["seeds"] > 1).any():
        return
    for title, own in _by_partition(table, f"test {shown_score(metric)}, paired by seed"):
        console.print(text_table(title, PAIR_HEADINGS, pair_cells(own), **_PLAIN))
    console.print(comparison_note(table, metric, default_score(results, metric)[0]))


def _by_partition(content: pd.DataFrame, title: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the title and the rows of each partition's table."""
    for partition, rows in content.groupby("partition", sort=False):
        yield f"{title}, {partition}" if content["partition"].nunique() > 1 else title, rows


def _ranked(results: Results, metrics: Sequence[str]) -> dict[str, Ranks]:
    """Return the ranks by score, if three methods or more are compared on three partitions."""
    known = [metric for metric in metrics if lower_is_better(metric) is not None]
    if results["partition"].nunique() < 3 or results["method"].nunique() < 3:
        return {}
    with suppress(FlsuiteError):  # the methods do not share the partitions
        return {metric: ranks(results, metric) for metric in known}
    return {}


def _write(request: argparse.Namespace, tables: _Tables, console: Console) -> None:
    """Write the tables and the pictures to a folder."""
    folder, results = make_folder(Path(request.output)), tables.results
    pages = [_markdown(request, tables)]
    pages += [
        comparison_markdown(own, name, default_score(results, name)[0])
        for name, own in tables.pairs.items()
    ]
    pages += [own.line(metric) + "\n" for metric, own in tables.ranks.items()]
    pages += ["".join(f"- {line}\n" for line in tables.stopping)]
    tex = latex_table(results, request.metric, request.against)
    tex += "".join(f"% {line}\n" for line in tables.stopping)
    of_ranks = {metric: own.table for metric, own in tables.ranks.items()}
    texts = {"report.md": "\n".join(filter(None, pages)), "report.tex": tex}
    csv_files = {"report": tables.scores, "comparison": _joined(tables.pairs)}
    csv_files |= {"target": _joined(tables.targets), "ranks": _joined(of_ranks)}
    texts |= {f"{name}.csv": csv_of(own) for name, own in csv_files.items() if len(own)}
    for name, text in texts.items():
        replace_text(text, folder / name)
    for metric in request.metric:
        for line in apart(tables.groups, metric, request.split, request.x):
            console.print(line)

    places = request.metric, request.split, request.x, request.target, request.band
    figures = {"report": curves_figure(results, *places)}
    figures |= {f"ranks-{name.replace('/', '-')}": ranks_figure(results, name) for name in of_ranks}
    drawn = [path.name for name, own in figures.items() for path in save_figure(own, folder / name)]
    print("\n".join(f"{folder}/{name}" for name in (*texts, *drawn)))


def _print_cross(
    request: argparse.Namespace, groups: Sequence[Group], left_out: Sequence[str]
) -> dict[str, Any]:
    """Print scores by two settings, and write them with heat maps to ``--output`` if given."""
    metrics, console = request.metric, Console()
    table = cross_table(groups, request.rows, request.columns, metrics)
    for metric in metrics:
        for panel, matrix in cross_matrices(table, metric).items():
            console.print(_shown_cross(matrix, ", ".join(filter(None, [f"test {metric}", panel]))))
    least, most = table["runs"].min(), table["runs"].max()
    console.print(
        f"last round, means; runs per cell: {most if least == most else f'{least} to {most}'}\n"
        "spreads, and the round picked on validation: --output FOLDER"
    )
    notes = [*left_out, *uneven(groups), *repeated(groups)]
    for line in notes:
        console.print(line)
    result = {"cells": plain_rows(table), "notes": notes}
    if not request.output:
        return result

    folder = make_folder(Path(request.output))
    replace_text(csv_of(table), folder / "cross.csv")
    (folder / "cross.md").write_text(cross_markdown(table), encoding="utf-8")
    written = [folder / "cross.csv", folder / "cross.md"]
    for metric in metrics:
        stem = folder / f"cross-{metric.replace('/', '-')}"
        written += save_figure(cross_figure(table, metric), stem)
    print("\n".join(map(str, written)))
    return result


def _shown_cross(matrix: pd.DataFrame, title: str) -> Table:
    """Return a panel as a table. Nine columns of scores fit in 80 characters."""
    cells = matrix.map(lambda value: "" if pd.isna(value) else shown_number(value, 3))
    rows = [(str(name), *row) for name, row in cells.iterrows()]
    look = {**_PLAIN, "pad_edge": True, "padding": (0, 0, 0, 1)}
    shown = text_table(title, ["", *map(str, cells)], rows, **look)
    for column, own in zip(shown.columns[1:], cells, strict=True):
        # As narrow as the numbers: rich would cut off the last column to fit long headings.
        column.width = max(5, cells[own].str.len().max())
    return shown
