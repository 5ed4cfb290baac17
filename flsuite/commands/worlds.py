"""The score of a run without some of its clients: trained again, or rebuilt from kept models."""

import logging
import time
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from flsuite.analysis.runs import curve, read_metrics
from flsuite.commands.fit import build
from flsuite.commands.replay import arguments
from flsuite.common.errors import FlsuiteError
from flsuite.common.messages import Split
from flsuite.runs.record import is_finished, last_round, read_settings, start_round
from flsuite.runs.rounds import KeptRound, read_rounds, refuse_unkept

_TRAINING = "use --by training"


class Worlds(ABC):
    """The scores of a run without some clients.

    Args:
        run: The run with all clients.
        metric: The score.
        at: The round after which the clients are gone.

    Attributes:
        clients: Number of clients.
        samples: Training samples by client.
        absent: Clients that the run itself is without. All worlds are without them too.
        made: Number of forks, or of aggregations that were done again.
        seconds: The time that they took.
        unit: What is made.
        split: The data of the scores.
    """

    unit: ClassVar[str]
    split: ClassVar[Split]

    def __init__(self, run: Path, metric: str, at: int) -> None:
        self.run, self._metric, self._at = run, metric, at
        self.made, self.seconds = 0, 0.0
        self.absent = frozenset(read_settings(run).get("without") or ())
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
        built = build(
            [
                *arguments(self.run, self._at, folder),
                *("--trainer.without", str(sorted(absent))),
                # Only the score of a world is read. No run is forked from it.
                *("--trainer.keep_updates", "false", "--trainer.keep_rounds", "null"),
            ]
        )
        logging.getLogger("flsuite").setLevel(logging.WARNING)
        return built


class Retrained(Worlds):
    """The scores on test data in the last round of forks that train without the clients.

    Args:
        run: The run with all clients.
        metric: The score.
        at: The round after which the forks begin.
        folder: The folder of the forks. A finished fork is read, and an interrupted one goes on.
    """

    unit, split = "forks", "test"

    def __init__(self, run: Path, metric: str, at: int, folder: Path) -> None:
        super().__init__(run, metric, at)
        self._folder = folder
        prepared = self._prepared
        scores = prepared.evaluator.scores(prepared.federation, "test", range(0))["global"]
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


class Rebuilt(Worlds):
    """The scores on validation data, summed over the kept rounds, of each round aggregated again.

    The models were trained with all clients, so a client's effect on the training of the others is
    left out. The Shapley value of the sum is the sum of the Shapley values of the rounds.
    """

    unit, split = "aggregations", "val"

    def __init__(self, run: Path, metric: str, at: int) -> None:
        super().__init__(run, metric, at)
        self._values: dict[tuple[int, frozenset[int]], float] = {}
        refuse_unkept(self._trainer, self._prepared, run, _TRAINING)

    def _score(self, absent: frozenset[int]) -> float:
        return sum(self._in_round(place, absent) for place in range(len(self.rounds)))

    @cached_property
    def rounds(self) -> list[KeptRound]:
        """Return the kept rounds."""
        started = time.perf_counter()
        rounds = read_rounds(self._trainer, self._prepared, self.run, self._at, _TRAINING)
        self.seconds += time.perf_counter() - started
        return rounds

    def _in_round(self, place: int, absent: frozenset[int]) -> float:
        kept = self.rounds[place]
        key = place, absent & kept.clients
        if key not in self._values:
            started = time.perf_counter()
            self._values[key] = kept.score(absent, self._metric)
            self.made += 1
            self.seconds += time.perf_counter() - started
        return self._values[key]
