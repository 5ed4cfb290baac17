"""The cells of a sweep, with the arguments and the folder of each run.

Tuning gives every method the same number of trials at every grid point. A trial is a draw from the
method's choices. It is run on the tuning seeds, and its score is the mean of their picked scores on
validation data. The best trial's values are used in the result cells, on seeds of their own.
"""

import itertools
import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flsuite.commands.sweeps.reading import Choices, Overrides, Sweep
from flsuite.common.errors import FlsuiteError
from flsuite.common.files import short_hash

# Parts of a config that do not affect the result. A cell keeps its identity if they change.
_OPEN = (
    "seed_everything",
    "run_dir",
    "ckpt_path",
    "trainer.run_dir",
    "trainer.engine",
    "trainer.logger",
    "trainer.enable_progress_bar",
)
_MOST_SAMPLES = 50  # a sample takes a second, and three if it reads a large dataset
_MOST_COMBINATIONS = 100_000
_LONGEST_LABEL = 79  # in the name of a folder
_ODD = re.compile(r"[^\w.=+-]+", re.ASCII)  # characters that such a name does without


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        method: Name of the method.
        point: Label of the grid point, empty without a grid.
        seed: The run's seed.
        overrides: All changes of the run to the sweep's config.
        folder: The run's folder, relative to the folder of the sweep.
        is_trial: Whether it is a trial of the tuning instead of a result.
        source: The cell whose trained client models it merges, if it does not train its own.
    """

    # Two cells are the same run if they have the same folder. Overrides cannot be hashed.
    method: str = field(compare=False)
    point: str = field(compare=False)
    seed: int = field(compare=False)
    overrides: Overrides = field(compare=False)
    folder: Path
    is_trial: bool = field(compare=False)
    source: "Cell | None" = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Return the method and the grid point, as text."""
        return f"{self.method} {self.point}".strip()


@dataclass(frozen=True, eq=False)
class TuningTrial:
    """One draw from a method's choices.

    Attributes:
        number: Number of the trial, starting at 1.
        values: The drawn values, by key.
        cells: One run per seed of the tuning.
    """

    number: int
    values: Overrides
    cells: tuple[Cell, ...]


@dataclass(frozen=True, eq=False)
class Search:
    """The search for the values of one method at one grid point.

    Attributes:
        method: Name of the method.
        point: The grid point.
        trials: The trials. Empty for a method without choices, which needs no tuning.
    """

    method: str
    point: Overrides
    trials: tuple[TuningTrial, ...]

    @property
    def name(self) -> str:
        """Return the method and the grid point, as text."""
        return f"{self.method} {label_of(self.point)}".strip()

    @property
    def cells(self) -> list[Cell]:
        """Return the runs of all trials."""
        return [cell for trial in self.trials for cell in trial.cells]


def searches(sweep: Sweep) -> list[Search]:
    """Return a search per grid point and method. Without tuning, searches have no trials."""
    tuning, found = sweep.tuning, []
    for point, method in itertools.product(grid_points(sweep), sweep.methods):
        trials = []
        if tuning and tuning.choices[method]:
            drawn = draw(tuning.choices[method], tuning.trials, tuning.seed, method)
            for number, values in enumerate(drawn, start=1):
                cells = (cell(sweep, method, values, point, seed, True) for seed in tuning.seeds)
                trials.append(TuningTrial(number, values, tuple(cells)))
        found.append(Search(method, point, tuple(trials)))
    return found


def draw(choices: Choices, trials: int, seed: int, method: str) -> list[Overrides]:
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


def grid_points(sweep: Sweep) -> list[Overrides]:
    """Return all combinations of the grid's values, or one empty combination without a grid."""
    values = itertools.product(*sweep.grid.values())
    return [dict(zip(sweep.grid, point, strict=True)) for point in values]


def cell(
    sweep: Sweep, method: str, tuned: Overrides, point: Overrides, seed: int, is_trial: bool
) -> Cell:
    """Return the cell of a method at a grid point, with its tuned values."""
    of_trials = sweep.tuning.overrides if sweep.tuning and is_trial else {}
    # An earlier cell without kept models must not count as this one.
    kept = {"trainer.keep_updates": True} if sweep.updates_from == method else {}
    changes = {**sweep.methods[method], **point, **tuned, **of_trials, **kept}
    folder = "-".join(filter(None, (method, _file_name(label_of(point)), _digest(sweep, changes))))
    place = Path("tuning", folder) if is_trial else Path(folder)
    overrides = {**sweep.shared, **changes}
    trains = sweep.updates_from in (None, method)
    source = None if trains else cell(sweep, str(sweep.updates_from), {}, point, seed, False)
    return Cell(method, label_of(point), seed, overrides, place / f"seed-{seed}", is_trial, source)


def fit_arguments(sweep: Sweep, cell: Cell, folder: Path) -> list[str]:
    """Return the arguments of ``flsuite fit`` for a cell.

    Args:
        sweep: The sweep.
        cell: One of its cells.
        folder: The folder of the sweep.
    """
    # A class must precede its arguments, whatever the order in the file.
    keys = sorted(cell.overrides, key=lambda key: key.count("."))
    changes = [f"--{key}={_text(cell.overrides[key])}" for key in keys]
    place = ["--run_dir", str(folder / cell.folder), "--ckpt_path", "last"]
    if cell.source:
        updates = folder / cell.source.folder
        place += [f"--trainer.from_updates={updates}", "--trainer.keep_updates=false"]
    return ["--config", str(sweep.config), "--seed_everything", str(cell.seed), *changes, *place]


def samples_of(sweep: Sweep) -> list[Cell]:
    """Return one cell per method and grid point, with one seed, to check which can start.

    The cells cover each value of the tuning. For a large grid, they cover each value of a key for
    each method, but not all combinations of values.
    """
    choices = sweep.tuning.choices if sweep.tuning else {}
    points = grid_points(sweep)
    if len(points) * len(sweep.methods) > _MOST_SAMPLES:
        points = _each_value(sweep.grid)
    samples = []
    for name in sweep.methods:
        tuned = _each_value(choices.get(name, {}))
        for n in range(max(len(tuned), len(points))):
            values, point = tuned[n % len(tuned)], points[n % len(points)]
            samples.append(cell(sweep, name, values, point, sweep.seeds[0], bool(choices)))
    return samples


def require_distinct(sweep: Sweep) -> None:
    """Refuse two methods that are the same experiment, because a report would merge them.

    Raises:
        FlsuiteError: If there are any.
    """
    names: dict[tuple[str, str], str] = {}
    for name, changes in sweep.methods.items():
        choices = sweep.tuning.choices[name] if sweep.tuning else {}
        content = _digest(sweep, changes), json.dumps(choices, sort_keys=True, default=str)
        if content in names:
            raise FlsuiteError(
                f"methods {names[content]} and {name} are the same experiment; leave one out"
            )
        names[content] = name


def label_of(values: Mapping[str, Any]) -> str:
    """Return values of a config as text, each with the last part of its key."""
    lasts = [key.rsplit(".", 1)[-1] for key in values]
    parts = []
    for (key, value), last in zip(values.items(), lasts, strict=True):
        name = last if lasts.count(last) == 1 else key
        parts.append(f"{name}={_readable(value)}")
    return " ".join(parts)


def _each_value(choices: Mapping[str, list[Any]]) -> list[Overrides]:
    """Return as few combinations as possible that cover each value."""
    number = max((len(values) for values in choices.values()), default=1)
    return [
        {key: values[n % len(values)] for key, values in choices.items()} for n in range(number)
    ]


def _digest(sweep: Sweep, changes: Overrides) -> str:
    """Return a hash, in eight characters, of everything that affects the result except the seed."""
    shared = {key: value for key, value in sweep.shared.items() if not _is_open(key)}
    return short_hash([_decisive(sweep.base), {**shared, **changes}])


def _decisive(node: Any, prefix: str = "") -> Any:
    """Return a part of a config without the keys that do not affect the result."""
    if not isinstance(node, Mapping):
        return node
    return {
        str(key): _decisive(value, f"{prefix}{key}.")
        for key, value in node.items()
        if not _is_open(f"{prefix}{key}")
    }


def _is_open(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _OPEN)


def _readable(value: Any) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        name = str(value["class_path"]).rsplit(".", 1)[-1]
        arguments = [f"{k}={_readable(v)}" for k, v in (value.get("init_args") or {}).items()]
        return f"{name}({', '.join(arguments)})" if arguments else name
    if isinstance(value, list):
        return "+".join(map(_readable, value))
    return _text(value)


def _file_name(label: str) -> str:
    """Return a label as part of a file name, without its last words if it is long."""
    words = label.split()
    # Whole words, because 0.001 truncated to 0.0 would be another value.
    while len(name := _ODD.sub("-", " ".join(words)).strip("-")) > _LONGEST_LABEL:
        words.pop()
    return name


def _text(value: Any) -> str:
    """Return a value in command-line form."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
