"""Honest tuning: the same budget for every method, on validation data and separate seeds.

Every method has the same number of trials at every grid point. A trial is a draw from the method's
choices. It is run on the tuning seeds, and its score is the mean of their picked validation scores.
The best trial's values are used in the result cells, whose seeds no trial has used.
"""

import csv
import io
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flsuite.commands.sweeps.outcome import CellEnd
from flsuite.commands.sweeps.plan import Cell, cell, grid_points, label_of
from flsuite.commands.sweeps.reading import Overrides, Sweep
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import escaped, replace_text

COLUMNS = ("method", "grid point", "trial", "values", "score", "chosen")

_MOST_COMBINATIONS = 100_000

OutcomeOf = Callable[[Cell], CellEnd | None]
"""Returns the outcome of a cell, or ``None`` if it is not done."""


@dataclass(frozen=True, eq=False)
class TuningRun:
    """One draw from a method's choices.

    Attributes:
        number: Number of the trial, starting at 1.
        values: The drawn values, by key.
        cells: One run per seed of the tuning.
    """

    number: int
    values: Overrides
    cells: tuple[Cell, ...]

    def score(self, outcome_of: OutcomeOf) -> float | None:
        """Return the mean of the validation scores, or ``None`` unless every seed has one."""
        outcomes = [outcome_of(cell) for cell in self.cells]
        scores = [o.val for o in outcomes if o is not None and o.val is not None]
        return sum(scores) / len(scores) if len(scores) == len(outcomes) else None

    def worth(self, outcome_of: OutcomeOf) -> float:
        """Return the score with its sign chosen so that the best trial has the largest."""
        score, outcome = self.score(outcome_of), outcome_of(self.cells[0])
        if score is None or outcome is None:
            return -math.inf
        return -score if outcome.lower_is_better else score


@dataclass(frozen=True, eq=False)
class Contest:
    """The trials of one method at one grid point.

    Attributes:
        method: Name of the method.
        point: The grid point.
        trials: The trials. Empty for a method without choices, which needs no tuning.
    """

    method: str
    point: Overrides
    trials: tuple[TuningRun, ...]

    @property
    def cells(self) -> list[Cell]:
        """Return the runs of all trials."""
        return [cell for trial in self.trials for cell in trial.cells]

    def best(self, outcome_of: OutcomeOf) -> TuningRun | None:
        """Return the trial with the best score, the first on a tie, or ``None`` without scores."""
        scored = [trial for trial in self.trials if trial.score(outcome_of) is not None]
        return max(scored, key=lambda trial: trial.worth(outcome_of), default=None)


def contests(sweep: Sweep) -> list[Contest]:
    """Return a contest per grid point and method. Without tuning, contests have no trials."""
    return [
        Contest(name, point, tuple(_trials(sweep, name, point)))
        for point in grid_points(sweep)
        for name in sweep.methods
    ]


def draw(choices: dict[str, list[object]], trials: int, seed: int, method: str) -> list[Overrides]:
    """Draw distinct combinations of values.

    A larger number of trials starts with the same draws. If there are no more combinations than
    trials, all of them are drawn.

    Raises:
        FlsuiteError: If there are too many combinations to shuffle.
    """
    number = math.prod(len(values) for values in choices.values())
    if number > _MOST_COMBINATIONS:
        raise FlsuiteError(
            f"tune.{method}: {number} combinations are more than {_MOST_COMBINATIONS}; list fewer "
            "values"
        )
    # The first key varies fastest. The order decides which trials a seed draws.
    combinations = list(itertools.product(*reversed(choices.values())))
    random.Random(f"{seed} {method}").shuffle(combinations)
    return [dict(zip(choices, reversed(values), strict=True)) for values in combinations[:trials]]


def write_tuning(
    path: Path,
    all_contests: Iterable[Contest],
    outcome_of: OutcomeOf,
    is_over: Callable[[Contest], bool],
) -> None:
    """Write ``tuning.csv``: each trial, its score, and whether it was chosen.

    Args:
        path: The file.
        all_contests: The contests of the sweep.
        outcome_of: Returns the outcome of a trial's cell.
        is_over: Returns whether a contest has run all its trials. Until then, none is chosen.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for contest in all_contests:
        best = contest.best(outcome_of) if is_over(contest) else None
        for trial in contest.trials:
            score, values = trial.score(outcome_of), json.dumps(trial.values, default=str)
            shown = "" if score is None else f"{score:.6g}"
            name = escaped(contest.method), escaped(label_of(contest.point))
            writer.writerow([*name, trial.number, values, shown, trial is best])
    replace_text(text.getvalue(), path)


def _trials(sweep: Sweep, method: str, point: Overrides) -> list[TuningRun]:
    tuning = sweep.tuning
    if tuning is None or not tuning.choices[method]:
        return []
    drawn = draw(tuning.choices[method], tuning.trials, tuning.seed, method)
    return [
        TuningRun(
            number,
            values,
            tuple(cell(sweep, method, values, point, seed, is_trial=True) for seed in tuning.seeds),
        )
        for number, values in enumerate(drawn, start=1)
    ]
