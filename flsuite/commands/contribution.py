"""``flsuite contribution``: what each client adds to the score of a federation."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from flsuite.analysis.clients import (
    contribution_figure,
    contribution_table,
    rank_correlation,
)
from flsuite.commands.parsers import parser_of
from flsuite.commands.run_folder import require_run
from flsuite.commands.shares import leave_one_out, shapley
from flsuite.commands.worlds import Rebuilt, Retrained, Worlds
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import csv_of, make_folder, replace_text
from flsuite.common.score_names import lower_is_better
from flsuite.runs.record import is_finished, last_round, read_settings

_NAMES = {"training": ["contribution"], "updates": ["estimate"]}
_NAMES["both"] = [*_NAMES["training"], *_NAMES["updates"]]


def contribution(args: list[str]) -> None:
    """Score the federation without clients, and write and print each client's contribution."""
    request = _parse(args)
    checked = _checked(request)
    folder, names = make_folder(Path(request.output)), _NAMES[request.by]
    less = bool(lower_is_better(request.metric))
    sign = -1 if less else 1  # a positive value is a useful client
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    while checked:
        run, clients, of_run = checked.pop(0)  # a run's models are large
        for name in reversed(names):  # the estimate comes first: it is cheap
            worlds = of_run.pop(name)
            for client, change in _shares(worlds, clients, request):
                value = sign * change + 0.0  # no -0.0
                own = {"client": client, "samples": worlds.samples[client]}
                rows.append({"run": run, **own, "name": name, "value": value})
            cost = {"seconds": worlds.seconds, "count": worlds.made, "unit": worlds.unit}
            costs.append({"run": run, "name": name, "split": worlds.split, **cost})

    values, cost = pd.DataFrame(rows), pd.DataFrame(costs)
    table = contribution_table(values, names)
    what = f"{'a lower ' * less}{request.metric}, {request.method}"
    for content, name in (values, "values"), (table, "contribution"), (cost, "cost"):
        replace_text(csv_of(content), folder / f"{name}.csv")
    picture = contribution_figure(table, values, f"contribution to {what}", names)
    picture.savefig(folder / "contribution.png", dpi=100)
    _print(table, f"contribution to {what}", names, cost)
    if len(names) == 2:
        _print_ranks(rank_correlation(values, names))
    print(f"{folder / 'contribution.csv'}\n{folder / 'contribution.png'}")


def _checked(request: Any) -> list[tuple[str, list[int], dict[str, Worlds]]]:
    """Return each run, its clients and what scores it, before anything is trained.

    Raises:
        FlsuiteError: If the runs do not fit together, or are not what the request needs.
    """
    checked, sizes = [], {}
    for run in request.runs:
        path = require_run("contribution", Path(run))
        if not is_finished(path):
            raise FlsuiteError(
                f"contribution: {run} was interrupted after round {last_round(path)}: "
                f"flsuite resume {run} first"
            )
        of_run = {name: _worlds(name, path, request) for name in _NAMES[request.by]}
        first = of_run[_NAMES[request.by][0]]
        checked.append((run, _chosen(request.clients, first), of_run))
        sizes[run] = first.clients
    if len({*sizes.values()}) > 1:
        have = ", ".join(f"{run}: {clients}" for run, clients in sizes.items())
        raise FlsuiteError(
            f"contribution: the runs have other numbers of clients ({have}); ask for one at a time"
        )
    return checked


def place_of(run: Path, at: int) -> str:
    """Return the folder of a run's forks: its name, and a hash of its settings and the round."""
    text = json.dumps([read_settings(run), at], sort_keys=True, default=str)
    return f"{run.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _worlds(name: str, run: Path, request: Any) -> Worlds:
    if name == "estimate":
        return Rebuilt(run, request.metric, request.at)
    return Retrained(
        run, request.metric, request.at, Path(request.output) / place_of(run, request.at)
    )


def _shares(worlds: Worlds, chosen: Sequence[int], request: Any) -> Iterator[tuple[int, float]]:
    if request.method == "shapley":
        return shapley(worlds, chosen, request.permutations, request.tolerance)
    return leave_one_out(worlds, chosen)


def _chosen(text: str, worlds: Worlds) -> list[int]:
    """Return the requested clients that are part of the run."""
    if text == "all":
        return [client for client in range(worlds.clients) if client not in worlds.absent]
    try:
        chosen = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise FlsuiteError(
            f"contribution: --clients must be all, or numbers such as 0,3,7, got {text}"
        ) from None
    if not 0 <= chosen[0] <= chosen[-1] < worlds.clients:
        raise FlsuiteError(
            f"contribution: --clients must be from 0 to {worlds.clients - 1}, got {text}"
        )
    if gone := sorted(worlds.absent.intersection(chosen)):
        who = f"client{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        raise FlsuiteError(
            f"contribution: {worlds.run} is without {who} already; leave them out of --clients"
        )
    return chosen


def _parse(args: list[str]) -> Any:
    request = parser_of("contribution").parse_args(args)
    if request.permutations < 1 or request.at < 0 or request.tolerance < 0:
        raise FlsuiteError(
            "contribution: --permutations must be at least 1, --at and --tolerance at least 0"
        )
    return request


def _print(table: pd.DataFrame, title: str, names: Sequence[str], costs: pd.DataFrame) -> None:
    shown = Table(title=title, title_justify="left")
    for column in ("client", "samples", *(c for name in names for c in (name, "spread"))):
        shown.add_column(column, justify="right")
    for _, row in table.sort_values(names[0], ascending=False).iterrows():
        numbers = [text for name in names for text in _cells(row[name], row[f"{name}_std"])]
        shown.add_row(f"{row['client']:.0f}", f"{row['samples']:.0f}", *numbers)
    Console().print(shown)
    for (name, split, unit), own in costs.groupby(["name", "split", "unit"], sort=False):
        cost = f"{own['count'].sum()} {unit}, {own['seconds'].sum():.1f} s"
        print(f"{name}: {split} data, {cost}")


def _print_ranks(correlations: pd.Series) -> None:
    """Print the rank correlations of the runs, if there is one."""
    if correlations.isna().all():
        return
    each = ", ".join(f"{value:.2f}" for value in correlations) if len(correlations) > 1 else ""
    print(f"rank correlation of the two: {correlations.mean():.2f}{each and f' (runs: {each})'}")


def _cells(value: float, std: float) -> tuple[str, str]:
    return f"{value:+.4f}", "" if pd.isna(std) else f"{std:.4f}"
