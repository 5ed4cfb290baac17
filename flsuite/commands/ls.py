"""``flsuite ls``: the runs in a folder, as a table."""

import argparse
from typing import Any, get_args

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flsuite.analysis.listing import Progress, list_runs
from flsuite.analysis.results import short_path
from flsuite.commands.parsers import parser_of
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import csv_of, plain_rows
from flsuite.common.score_names import lower_is_better, shown_number

_FILTERS = ("method", "data", "partition")
_COLORS = {"finished": "green", "running": "cyan", "interrupted": "yellow"}
_COLORS |= {"failed": "red", "broken": "red"}
_WIDE = 200  # characters per line when the output is not a terminal
_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))  # units in seconds


def ls(args: list[str]) -> dict[str, Any]:
    """Print a table of the runs, or write them as CSV to the standard output, and return them."""
    request = parser_of("ls").parse_args(args)
    runs = list_runs(request.folders)
    chosen = _sorted(_filtered(runs, request), request.sort)
    plain = chosen.assign(run=chosen["run"].map(short_path))
    if request.csv:
        print(csv_of(plain), end="")
    else:
        _print(runs, chosen)
    return {"runs": plain_rows(plain)}


def _print(runs: pd.DataFrame, chosen: pd.DataFrame) -> None:
    """Print the chosen runs, how many are in which state, and the errors."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(_table(chosen))
    hidden = len(runs) - len(chosen)
    counts = chosen["state"].value_counts()
    states = [f"{counts[state]} {state}" for state in get_args(Progress) if state in counts]
    total = f"{len(chosen)} run{'s' * (len(chosen) != 1)}"
    print(", ".join([total, *states, *([f"{hidden} hidden"] if hidden else [])]))
    for _, run in chosen[chosen["error"] != ""].iterrows():
        print(f"{run['state']}: {short_path(run['run'])}: {run['error']}")


def _filtered(runs: pd.DataFrame, request: argparse.Namespace) -> pd.DataFrame:
    """Return the runs that pass the filters.

    A filter matches a whole name, or part of a name if no run has exactly that name. Case is
    ignored.

    Raises:
        FlsuiteError: If a filter matches no run.
    """
    if request.state:
        runs = runs[runs["state"] == request.state]
    for name in _FILTERS:
        wanted = getattr(request, name)
        if wanted is None or runs.empty:
            continue
        values = runs[name].fillna("").str.lower()
        equal = values == wanted.lower()
        matching = equal if equal.any() else values.str.contains(wanted.lower(), regex=False)
        if not matching.any():
            known = ", ".join(sorted(set(runs[name].dropna())))
            raise FlsuiteError(f"ls: no run has {name} {wanted}; there are: {known}")
        runs = runs[matching]
    return runs


def _sorted(runs: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the sorted runs, with the best score, the most rounds or the newest first."""
    if by == "run":
        return runs
    if by in ("age", "rounds"):
        return runs.sort_values("modified" if by == "age" else by, ascending=False)
    # Scores are compared in the round picked on validation data, if there is one.
    scores = runs["picked"].fillna(runs["last"]).astype(float)
    signs = runs["score"].map(lambda name: -1 if lower_is_better(str(name)) else 1)
    order = (scores * signs).sort_values(ascending=False, na_position="last").index
    return runs.loc[order].sort_values("score", kind="stable")


def _table(runs: pd.DataFrame) -> Table:
    scores = list(dict.fromkeys(runs["score"].dropna()))
    unit = f"test {scores[0]}" if len(scores) == 1 else "test scores"
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        title=f"{unit} in the last round, and in the one picked on validation data",
        title_justify="left",
    )
    for heading in ("run", "method", "data"):
        table.add_column(heading, overflow="fold")
    for heading in ("rounds", "last", "picked"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)

    now = pd.Timestamp.now(tz="UTC")
    for run in runs.to_dict("records"):
        name = f"{run['score']} " if len(scores) > 1 and pd.notna(run["last"]) else ""
        text = {key: "" if pd.isna(value) else str(value) for key, value in run.items()}
        rounds = [f"{run[key]:.0f}" for key in ("rounds", "of") if text[key]]
        cells = [
            short_path(run["run"]),
            text["method"],
            f"{text['data']} {text['partition']}".strip(),
            "/".join(rounds if text["rounds"] else []),
            f"{name}{_number(run['last'])}",
            _number(run["picked"]),
        ]
        state = Text(run["state"], style=_COLORS[run["state"]])
        age = _age((now - run["modified"]).total_seconds())
        # Text is not parsed for markup, which a folder's name may resemble.
        table.add_row(*map(Text, cells), state, Text(age))
    return table


def _number(value: float) -> str:
    return "" if pd.isna(value) else shown_number(value)


def _age(seconds: float) -> str:
    """Return a time span as a number of its largest unit."""
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "0 s"
