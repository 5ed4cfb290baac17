"""``flsuite contribution``: what each client adds to the score of a federation.

Leave-one-out, and truncated Monte-Carlo Shapley values: Ghorbani and Zou 2019, Data Shapley,
arXiv:1904.02868, algorithm 1, with clients in the place of samples. The utility of a set of clients
is the score of the run without the others: trained again, or rebuilt from kept models.
"""

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from rich.console import Console

from flsuite.analysis.clients import contribution_figure, contribution_table, rank_correlation
from flsuite.analysis.runs import curve, read_metrics
from flsuite.commands.fit import build
from flsuite.commands.fork import QUIET, repetition
from flsuite.commands.parsers import parser_of
from flsuite.commands.request import require_run
from flsuite.common.arguments import NonNegativeFloat, PositiveInt, require
from flsuite.common.errors import FlsuiteError, log
from flsuite.common.files import csv_of, make_folder, replace_text, short_hash
from flsuite.common.messages import Split
from flsuite.common.random import numpy_generator
from flsuite.common.score_names import lower_is_better, text_table
from flsuite.runs.record import is_finished, last_round, read_settings, start_round
from flsuite.runs.rounds import KeptRound, read_rounds, refuse_unkept

_TRAINING = "use --by training"


class _Utility(ABC):
    """The scores of a run without some clients.

    Args:
        run: The run with all clients.
        metric: The score.
        at: The round after which the clients are gone.
        output: The folder of the command's files.

    Attributes:
        clients: Number of clients.
        samples: Training samples by client.
        absent: Clients that the run itself is without. All its scores are without them too.
        made: Number of forks, or of aggregations that were done again.
        seconds: The time that they took.
        seed: The seed of the run.
        unit: What is made.
        split: The data of the scores.
    """

    unit: ClassVar[str]
    split: ClassVar[Split]

    def __init__(self, run: Path, metric: str, at: int, output: Path) -> None:
        self.run, self._metric, self._at = run, metric, at
        self._folder = output / place_of(run, at)
        self.made, self.seconds = 0, 0.0
        settings = read_settings(run)
        self.seed, self.absent = settings["seed"], frozenset(settings.get("without") or ())
        self._scores: dict[frozenset[int], float] = {}
        if at >= (last := last_round(run)):
            raise FlsuiteError(
                f"contribution: {run} has {last} rounds, and forks need one of their own; "
                f"give --at below {last}"
            )
        self._trainer, model, data = self._built(self.absent, run)
        self._prepared = self._trainer.prepare(model, data)
        federation = self._prepared.federation
        self.clients = federation.data.clients
        self.samples = {c: federation.data.samples(c) for c in range(self.clients)}

    def score(self, absent: frozenset[int]) -> float:
        """Return the score of the run without these clients."""
        if absent not in self._scores:
            self._scores[absent] = self._score(absent)
        return self._scores[absent]

    @abstractmethod
    def _score(self, absent: frozenset[int]) -> float:
        """Compute the score of the run without these clients."""

    def _built(self, absent: frozenset[int], folder: Path) -> Any:
        # Only the score of a fork is read. No run is forked from it.
        kept = ("--trainer.keep_updates", "false", "--trainer.keep_rounds", "null")
        changes = ("--run_dir", str(folder), "--trainer.without", str(sorted(absent)), *kept)
        built = build(repetition(self.run, self._at or None, *QUIET, *changes))
        log.setLevel(logging.WARNING)
        return built


class _RetrainedUtility(_Utility):
    """The scores on test data in the last round of forks that train without the clients.

    A finished fork is read, and an interrupted one goes on.
    """

    unit, split = "forks", "test"

    def __init__(self, run: Path, metric: str, at: int, output: Path) -> None:
        super().__init__(run, metric, at, output)
        prepared = self._prepared
        scores = prepared.evaluator.scores(prepared.federation, "test", range(0)).get("global", {})
        if metric not in scores:
            raise FlsuiteError(
                f"contribution: {run} has no score {metric}; there are {', '.join(sorted(scores))}"
            )
        self._untrained = float(scores[metric])

    def _score(self, absent: frozenset[int]) -> float:
        if not absent:
            return self._last(self.run)
        if len(absent | self.absent) == self.clients:  # nobody trains after the fork
            begins = max(self._at, start_round(self.run))
            return self._at_the_fork(begins) if begins else self._untrained
        folder = self._folder / f"without-{'-'.join(map(str, sorted(absent)))}"
        if not ((folder / "checkpoints" / "model.ckpt").is_file() and is_finished(folder)):
            trainer, model, data = self._built(absent | self.absent, folder)
            trainer.fit(model, data, ckpt_path="last")
        self.made += 1
        self.seconds += self._own_seconds(folder)
        return self._last(folder)

    def _last(self, folder: Path) -> float:
        return float(curve(read_metrics(folder), self._metric, "test").iloc[-1])

    def _own_seconds(self, folder: Path) -> float:
        """Return the seconds of a fork's own rounds, including rounds before a kill."""
        times = read_metrics(folder).groupby("round")["wall_s"].max()
        before = times[times.index <= self._at].max() if self._at else 0.0
        return float(times.max() - before)

    def _at_the_fork(self, round: int) -> float:
        scores = curve(read_metrics(self.run), self._metric, "test")
        if round not in scores.index:
            raise FlsuiteError(
                f"contribution: {self.run} was not scored in round {round}; choose another --at"
            )
        return float(scores[round])


class _RebuiltUtility(_Utility):
    """The scores on validation data, summed over the kept rounds, of each round aggregated again.

    The models were trained with all clients, so a client's effect on the training of the others is
    left out. The Shapley value of the sum is the sum of the Shapley values of the rounds.
    """

    unit, split = "aggregations", "val"

    def __init__(self, run: Path, metric: str, at: int, output: Path) -> None:
        super().__init__(run, metric, at, output)
        self._values: dict[tuple[int, frozenset[int]], float] = {}
        refuse_unkept(self._trainer, self._prepared, run, _TRAINING)

    def _score(self, absent: frozenset[int]) -> float:
        started = time.perf_counter()
        score = sum(self._in_round(kept, absent) for kept in self.rounds)
        self.seconds += time.perf_counter() - started
        return score

    @cached_property
    def rounds(self) -> list[KeptRound]:
        """Return the kept rounds."""
        return read_rounds(self._trainer, self._prepared, self.run, self._at, _TRAINING)

    def _in_round(self, kept: KeptRound, absent: frozenset[int]) -> float:
        key = kept.number, absent & kept.clients
        if key not in self._values:
            self._values[key] = kept.score(absent, self._metric)
            self.made += 1
        return self._values[key]


_KINDS: dict[str, dict[str, type[_Utility]]] = {
    "training": {"contribution": _RetrainedUtility},
    "updates": {"estimate": _RebuiltUtility},
}
_KINDS["both"] = _KINDS["training"] | _KINDS["updates"]
"""The columns of the table by ``--by``, and the utility of each."""


def leave_one_out(utility: _Utility, clients: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yield each client, and how much higher the score of the run is than without it."""
    whole = utility.score(frozenset())
    for place, client in enumerate(clients, start=1):
        value = whole - utility.score(frozenset({client}))
        print(f"{place}/{len(clients)}  without client {client}: {-value:+.4f}", file=sys.stderr)
        yield client, value


def shapley(
    utility: _Utility, clients: Sequence[int], permutations: int, tolerance: float
) -> Iterator[tuple[int, float]]:
    """Yield the marginal contributions of clients that join in random orders.

    All other clients are always present. Orders share the scores of equal sets.

    Args:
        utility: The scores.
        clients: The clients that join.
        permutations: Number of orders.
        tolerance: Once the score is this close to the score of the whole run, clients that join
            later count as adding nothing.
    """
    seed = int(utility.seed)
    whole, nobody = utility.score(frozenset()), frozenset(clients)
    for number in range(permutations):
        order = numpy_generator(seed, "contribution", number).permutation(list(clients)).tolist()
        absent, before = nobody, utility.score(nobody)
        for client in order:
            absent = absent - {client}
            is_near = abs(whole - before) <= tolerance
            after = before if is_near else utility.score(absent)
            yield client, after - before
            before = after
        print(
            f"{number + 1}/{permutations}  orders, {utility.made} {utility.unit}", file=sys.stderr
        )


def contribution(args: list[str]) -> None:
    """Score the federation without clients, and write and print each client's contribution."""
    request = parser_of("contribution").parse_args(args)
    require("contribution", PositiveInt | None, **{"--permutations": request.permutations})
    least = {"--at": request.at, "--tolerance": request.tolerance}
    require("contribution", NonNegativeFloat | None, **least)
    checked = _checked(request)
    folder, names = make_folder(Path(request.output)), list(_KINDS[request.by])
    less = bool(lower_is_better(request.metric))
    sign = -1 if less else 1  # a positive value is a useful client

    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    while checked:
        run, clients, of_run = checked.pop(0)  # a run's models are large
        for name in reversed(names):  # the estimate comes first: it is cheap
            utility = of_run.pop(name)
            shares = leave_one_out(utility, clients)
            if request.method == "shapley":
                shares = shapley(utility, clients, request.permutations, request.tolerance)
            for client, change in shares:
                value = sign * change + 0.0  # no -0.0
                own = {"client": client, "samples": utility.samples[client]}
                rows.append({"run": run, **own, "name": name, "value": value})
            cost = {"seconds": utility.seconds, "count": utility.made, "unit": utility.unit}
            costs.append({"run": run, "name": name, "split": utility.split, **cost})

    values, cost = pd.DataFrame(rows), pd.DataFrame(costs)
    table = contribution_table(values, names)
    title = f"contribution to {'a lower ' * less}{request.metric}, {request.method}"
    for content, name in (values, "values"), (table, "contribution"), (cost, "cost"):
        replace_text(csv_of(content), folder / f"{name}.csv")
    contribution_figure(table, values, title, names).savefig(folder / "contribution.png", dpi=100)
    _print(table, title, names, cost)
    if len(names) == 2:
        _print_ranks(rank_correlation(values, names))
    print(f"{folder / 'contribution.csv'}\n{folder / 'contribution.png'}")


def _checked(request: Any) -> list[tuple[str, list[int], dict[str, _Utility]]]:
    """Return each run, its clients and its utilities, before anything is trained.

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
        of_run = {
            name: kind(path, request.metric, request.at, Path(request.output))
            for name, kind in _KINDS[request.by].items()
        }
        first = next(iter(of_run.values()))
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
    return f"{run.resolve().name}-{short_hash([read_settings(run), at])}"


def _chosen(text: str, utility: _Utility) -> list[int]:
    """Return the requested clients that are part of the run."""
    if text == "all":
        return [client for client in range(utility.clients) if client not in utility.absent]
    try:
        chosen = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise FlsuiteError(
            f"contribution: --clients must be all, or numbers such as 0,3,7, got {text}"
        ) from None
    if not 0 <= chosen[0] <= chosen[-1] < utility.clients:
        raise FlsuiteError(
            f"contribution: --clients must be from 0 to {utility.clients - 1}, got {text}"
        )
    if gone := sorted(utility.absent.intersection(chosen)):
        who = f"client{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
        raise FlsuiteError(
            f"contribution: {utility.run} is without {who} already; leave them out of --clients"
        )
    return chosen


def _print(table: pd.DataFrame, title: str, names: Sequence[str], costs: pd.DataFrame) -> None:
    headings = ("client", "samples", *(c for name in names for c in (name, "spread")))
    shown = text_table(title, headings, (), words=0)
    for _, row in table.sort_values(names[0], ascending=False).iterrows():
        cells = [f"{row['client']:.0f}", f"{row['samples']:.0f}"]
        for name in names:
            spread = row[f"{name}_std"]
            cells += [f"{row[name]:+.4f}", "" if pd.isna(spread) else f"{spread:.4f}"]
        shown.add_row(*cells)
    Console().print(shown)
    for (kind, split, unit), own in costs.groupby(["name", "split", "unit"], sort=False):
        cost = f"{own['count'].sum()} {unit}, {own['seconds'].sum():.1f} s"
        print(f"{kind}: {split} data, {cost}")


def _print_ranks(correlations: pd.Series) -> None:
    """Print the rank correlations of the runs, if there is one."""
    if correlations.isna().all():
        return
    each = ", ".join(f"{value:.2f}" for value in correlations) if len(correlations) > 1 else ""
    print(f"rank correlation of the two: {correlations.mean():.2f}{each and f' (runs: {each})'}")
