"""``flsuite contribution``: what each client adds to the score of a federation, by runs without it.

Leave-one-out, and truncated Monte-Carlo Shapley values: Ghorbani and Zou 2019, Data Shapley,
arXiv:1904.02868, algorithm 1, with clients in the place of samples.
"""

import hashlib
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from flsuite.analysis.runs import curve, read_metrics
from flsuite.commands.arguments import CommandParser
from flsuite.commands.fit import build
from flsuite.commands.record import first_round, last_round
from flsuite.commands.run_folder import require_run
from flsuite.errors import FlsuiteError
from flsuite.files import make_folder
from flsuite.random import numpy_generator
from flsuite.runs.fork import parent_settings

_METHODS = ("leave-one-out", "shapley")


def contribution(args: list[str]) -> None:
    """Run the federations without clients, and write and print each client's contribution."""
    request = _parse(args)
    folder = make_folder(Path(request.output))
    rows: dict[int, list[float]] = defaultdict(list)
    samples: dict[int, list[int]] = defaultdict(list)
    for name in request.runs:
        run = require_run("contribution", Path(name))
        worlds = Worlds(run, folder / place_of(run, request.at), request.metric, request.at)
        chosen = [c for c in _chosen(request.clients, worlds.clients) if c not in worlds.absent]
        if request.method == "shapley":
            parts = shapley(worlds, chosen, request.permutations, request.tolerance)
        else:
            parts = leave_one_out(worlds, chosen)
        for client, value in parts:
            rows[client].append(value)
        for client in chosen:
            samples[client].append(worlds.samples[client])

    table = pd.DataFrame(
        {
            "client": client,
            "samples": sum(samples[client]) / len(samples[client]),
            "contribution": float(pd.Series(values).mean()),
            "std": float(pd.Series(values).std()) if len(values) > 1 else float("nan"),
            "values": len(values),
        }
        for client, values in sorted(rows.items())
    )
    table.to_csv(folder / "contribution.csv", index=False)
    what = f"contribution to test {request.metric}, {request.method}"
    contribution_figure(table, what).savefig(folder / "contribution.png")
    _print(table, what)
    print(f"{folder / 'contribution.csv'}\n{folder / 'contribution.png'}")


def place_of(run: Path, at: int) -> str:
    """Return the folder of a run's forks: its name, and a hash of its settings and the round."""
    text = json.dumps([parent_settings(run), at], sort_keys=True, default=str)
    return f"{run.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass
class Worlds:
    """The scores of a run and of its forks without some clients, each trained once.

    Attributes:
        run: The run with all clients.
        folder: The folder of the forks. A finished fork is read, and an interrupted one goes on.
        metric: The score on test data, in the last round.
        at: The round that the forks begin after.
        trained: Number of forks that were trained.
        absent: Clients that the run itself is without. Its forks are without them too.
    """

    run: Path
    folder: Path
    metric: str
    at: int
    trained: int = 0
    clients: int = field(init=False)
    samples: dict[int, int] = field(init=False)
    absent: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.at >= (last := last_round(self.run)):
            raise FlsuiteError(
                f"contribution: {self.run} has {last} rounds, and forks need one of their own; "
                f"give --at below {last}"
            )
        self.absent = frozenset(parent_settings(self.run).get("without") or ())
        self._scores: dict[frozenset[int], float] = {}
        trainer, model, data = self._built(sorted(self.absent), self.run)
        federation = trainer.prepare(model, data).federation
        self.clients = federation.data.clients
        self.samples = {c: federation.data.samples(c) for c in range(self.clients)}
        scores = trainer.run.evaluator.scores(federation, "test", range(0))["global"]
        if self.metric not in scores:
            raise FlsuiteError(
                f"contribution: {self.run} has no score {self.metric}; there are "
                f"{', '.join(sorted(scores))}"
            )
        self._untrained = float(scores[self.metric])

    def score(self, absent: frozenset[int]) -> float:
        """Return the score of the run without these clients."""
        if absent not in self._scores:
            self._scores[absent] = self._score(absent)
        return self._scores[absent]

    def _score(self, absent: frozenset[int]) -> float:
        if not absent:
            return self._last(self.run)
        if len(absent | self.absent) == self.clients:  # nobody trains after the fork
            begins = max(self.at, first_round(self.run))
            return self._at_the_fork(begins) if begins else self._untrained
        folder = self.folder / f"without-{'-'.join(map(str, sorted(absent)))}"
        if not self._is_done(folder):
            trainer, model, data = self._built(sorted(absent | self.absent), folder)
            trainer.fit(model, data, ckpt_path="last")
            self.trained += 1
        return self._last(folder)

    def _built(self, absent: list[int], folder: Path) -> Any:
        begin = [
            *("--trainer.fork.run", str(self.run)),
            *("--trainer.fork.round", str(self.at)),
        ]
        built = build(
            [
                *("--config", str(self.run / "config.yaml"), "--run_dir", str(folder)),
                *(["--trainer.without", str(absent), *(begin if self.at else [])]),
                *("--trainer.logger", "false", "--trainer.enable_progress_bar", "false"),
            ]
        )
        logging.getLogger("flsuite").setLevel(logging.WARNING)
        return built

    def _is_done(self, folder: Path) -> bool:
        if not (folder / "checkpoints" / "model.ckpt").is_file():
            return False
        last, whole = (int(read_metrics(run)["round"].max()) for run in (folder, self.run))
        return last == whole

    def _last(self, folder: Path) -> float:
        return float(curve(read_metrics(folder), self.metric, "test").iloc[-1])

    def _at_the_fork(self, round: int) -> float:
        scores = curve(read_metrics(self.run), self.metric, "test")
        if round not in scores.index:
            raise FlsuiteError(
                f"contribution: {self.run} was not scored in round {round}; choose another --at"
            )
        return float(scores[round])


def leave_one_out(worlds: Worlds, clients: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield each client, and the score of the run minus that of the run without it."""
    whole = worlds.score(frozenset())
    for place, client in enumerate(clients, start=1):
        value = whole - worlds.score(frozenset({client}))
        print(f"{place}/{len(clients)}  without client {client}: {-value:+.4f}", file=sys.stderr)
        yield client, value


def shapley(
    worlds: Worlds, clients: Sequence[int], permutations: int, tolerance: float
) -> Iterator[tuple[int, float]]:
    """Yield the marginal contributions of clients that join in random orders.

    All other clients are always there. Orders share the runs of equal sets.

    Args:
        worlds: The runs.
        clients: Who joins.
        permutations: Number of orders.
        tolerance: Distance to the score of the whole run, from which on those who join later are
            taken to add nothing.
    """
    seed = int(parent_settings(worlds.run)["seed"])
    whole, nobody = worlds.score(frozenset()), frozenset(clients)
    for number in range(permutations):
        order = numpy_generator(seed, "contribution", number).permutation(list(clients)).tolist()
        absent, before = nobody, worlds.score(nobody)
        for client in order:
            absent = absent - {client}
            is_near = abs(whole - before) <= tolerance
            after = before if is_near else worlds.score(absent)
            yield client, after - before
            before = after
        print(
            f"{number + 1}/{permutations}  orders, {worlds.trained} runs trained", file=sys.stderr
        )


def contribution_figure(table: pd.DataFrame, title: str) -> Figure:
    """Draw the contributions as bars, with their spread over runs or orders.

    Args:
        table: ``contribution.csv``.
        title: What is drawn.
    """
    figure = Figure(figsize=(max(4.0, 0.4 * len(table) + 2), 3.2), layout="constrained")
    axes = figure.add_subplot()
    spread = table["std"] if table["std"].notna().all() else None
    axes.bar(table["client"].astype(str), table["contribution"], yerr=spread, color="tab:blue")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="client", ylabel="contribution")
    axes.set_title(title, fontsize=10)
    return figure


def _chosen(text: str, clients: int) -> list[int]:
    if text == "all":
        return list(range(clients))
    try:
        chosen = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise FlsuiteError(
            f"contribution: --clients must be all, or numbers such as 0,3,7, got {text}"
        ) from None
    if not 0 <= chosen[0] <= chosen[-1] < clients:
        raise FlsuiteError(f"contribution: --clients must be from 0 to {clients - 1}, got {text}")
    return chosen


def _parse(args: list[str]) -> Any:
    parser = CommandParser("contribution")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--clients", default="all")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--method", choices=_METHODS, default=_METHODS[0])
    parser.add_argument("--permutations", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--metric", default="accuracy")
    parser.add_argument("--output", default="contribution")
    request = parser.parse_args(args)
    if request.permutations < 1 or request.at < 0 or request.tolerance < 0:
        raise FlsuiteError(
            "contribution: --permutations must be at least 1, --at and --tolerance at least 0"
        )
    return request


def _print(table: pd.DataFrame, title: str) -> None:
    shown = Table(title=title, title_justify="left")
    for column in ("client", "samples", "contribution", "spread", "values"):
        shown.add_column(column, justify="right")
    for row in table.sort_values("contribution", ascending=False).itertuples():
        spread = "" if pd.isna(row.std) else f"{row.std:.4f}"
        numbers = f"{row.samples:.0f}", f"{row.contribution:+.4f}", spread, f"{row.values}"
        shown.add_row(str(row.client), *numbers)
    Console().print(shown)
