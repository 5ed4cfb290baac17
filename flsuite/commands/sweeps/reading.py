"""Reading and checking a sweep's file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flsuite.common.errors import FlsuiteError, likeliest
from flsuite.common.files import read_yaml

Overrides = dict[str, Any]
"""A mapping from dotted keys of a config, without ``init_args``, to values."""

_KEYS = ("config", "seeds", "methods", "grid", "tune", "overrides", "workers", "updates_from")
_TUNING_KEYS = ("trials", "seeds", "seed", "common", "overrides")
# The sweep itself sets these keys, one value per run.
_SWEEP_KEYS = ("config", "seed_everything", "run_dir", "ckpt_path", "trainer.run_dir")
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)


@dataclass(frozen=True)
class Tuning:
    """How methods are tuned before their results.

    Attributes:
        trials: Maximum number of trials per method and grid point.
        seeds: Seeds of the trials. They differ from the seeds of the results.
        seed: Determines which trials are drawn.
        choices: The values that a trial may draw, by method and key.
        overrides: Changes of the trials alone, such as fewer rounds.
    """

    trials: int
    seeds: tuple[int, ...]
    seed: int
    choices: dict[str, dict[str, list[Any]]]
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep's file.

    Attributes:
        name: Name of the file, and of the default folder.
        config: The config that all cells start from.
        base: The content of this config.
        seeds: Seeds of the results.
        methods: The changes of each method to the config, by name.
        grid: Values by key. The grid points are all combinations.
        shared: The changes of all cells to the config.
        workers: Cells that run at the same time.
        tuning: How methods are tuned, if they are.
        updates_from: The method that trains the clients' models for all. The others merge the same
            models, of its cell with the same seed and grid point.
    """

    name: str
    config: Path
    base: dict[str, Any]
    seeds: tuple[int, ...]
    methods: dict[str, Overrides]
    grid: dict[str, list[Any]]
    shared: Overrides = field(default_factory=dict)
    workers: int = 1
    tuning: Tuning | None = None
    updates_from: str | None = None


def read_sweep(
    path: str | Path, overrides: Mapping[str, Any] | None = None, workers: int | None = None
) -> Sweep:
    """Read a sweep's file.

    Args:
        path: The file.
        overrides: More changes for all cells. They win over the file.
        workers: Cells that run at the same time. Default: as in the file, else one.

    Raises:
        FlsuiteError: If the file has an error. The message names the place.
    """
    path = Path(path)
    reader = _Reader(str(path))
    content = reader.load(path)
    reader.require_known(content, _KEYS, "")
    for name in ("config", "seeds", "methods"):
        if content.get(name) is None:
            raise reader.error(name, "is missing")

    config = reader.find_config(content["config"], path)
    methods = reader.methods(content["methods"])
    grid = reader.grid(content.get("grid"), "grid" in content)
    shared = {
        **reader.overrides(content.get("overrides"), "overrides"),
        **reader.overrides(overrides, "the command line"),
    }
    seeds = reader.seeds(content["seeds"], "seeds")
    tuning = reader.tuning(content.get("tune"), methods, seeds)
    reader.require_one_value(methods, grid, shared, tuning)
    updates_from = reader.updates_from(content.get("updates_from"), methods, tuning)

    requested = content.get("workers", 1) if workers is None else workers
    workers = reader.whole(requested, "workers", 1)
    base = reader.load(config)
    return Sweep(
        path.stem, config, base, seeds, methods, grid, shared, workers, tuning, updates_from
    )


class _Reader:
    """Parses a sweep's file, one method per part. Errors name the file and the place."""

    def __init__(self, path: str) -> None:
        self.path = path

    def error(self, place: str, what: str) -> FlsuiteError:
        return FlsuiteError(f"{self.path}: {place}{' ' if place else ''}{what}")

    def load(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            raise FlsuiteError(f"there is no file {path}")
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise FlsuiteError(f"{path} must be a mapping of keys to values")
        return content

    def require_known(self, content: Mapping[str, Any], known: Sequence[str], place: str) -> None:
        for key in content:
            if key not in known:
                near = likeliest(str(key), known, cutoff=0.6)
                hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
                if key in ("model", "data", "trainer", "seed_everything"):
                    hint = f"a run's config is for flsuite fit --config {self.path}"
                raise self.error(place, f"has an unknown key {key!r}; {hint}")

    def find_config(self, name: Any, path: Path) -> Path:
        """Return the path of the config, relative to the working folder or to the sweep's file."""
        if not isinstance(name, str):
            raise self.error("config", f"must be the path of a config, got {name!r}")
        places = list(dict.fromkeys((Path(name), path.parent / name)))
        for config in places:
            if config.is_file():
                return config
        raise self.error("config", f"names no file: {' or '.join(map(str, places))}")

    def methods(self, content: Any) -> dict[str, Overrides]:
        if not isinstance(content, dict) or not content:
            raise self.error(
                "methods",
                "must map at least one name to the keys that it changes, such as FedProx: "
                "{trainer.aggregator: FedProx}",
            )
        for name in content:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TUNING_KEYS:
                raise self.error(
                    "methods",
                    f"{name!r} cannot be a name; use letters, digits and . _ + -, but none of "
                    + ", ".join(_TUNING_KEYS),
                )
        return {name: self.overrides(keys, f"methods.{name}") for name, keys in content.items()}

    def overrides(self, content: Any, place: str) -> Overrides:
        if content is None:
            return {}
        if not isinstance(content, Mapping):
            raise self.error(place, f"must map keys of the config to values, got {content!r}")
        return {self._key(key, place): value for key, value in content.items()}

    def _key(self, key: Any, place: str) -> str:
        if not isinstance(key, str):
            raise self.error(place, f"{key!r} is not a key of a config")
        # An argument of a class has the same key with and without init_args.
        parts = [part for part in key.split(".") if part != "init_args"]
        plain = ".".join(parts[:-1] if parts[-1:] == ["class_path"] else parts)
        if plain in _SWEEP_KEYS or not plain:
            raise self.error(place, f"cannot set {key!r}, because the sweep sets it for each run")
        return plain

    def grid(self, content: Any, is_given: bool) -> dict[str, list[Any]]:
        if is_given and not content:
            raise self.error("grid", "is empty; map keys to lists of values, or leave grid out")
        return self._choices(content, "grid")

    def _choices(self, content: Any, place: str) -> dict[str, list[Any]]:
        choices = self.overrides(content, place)
        for key, values in choices.items():
            if not isinstance(values, list) or not values:
                raise self.error(f"{place}.{key}", f"must be a list of values, got {values!r}")
            for position, value in enumerate(values):
                if value in values[:position]:
                    raise self.error(f"{place}.{key}", f"has {value!r} twice")
        return choices

    def seeds(self, content: Any, place: str) -> tuple[int, ...]:
        if not isinstance(content, list) or not content:
            raise self.error(place, f"must be a list of whole numbers, got {content!r}")
        for seed in content:
            self.whole(seed, place, 0)
            if content.count(seed) > 1:
                raise self.error(place, f"has {seed} twice")
        return tuple(content)

    def whole(self, value: Any, place: str, least: int) -> int:
        if type(value) is not int or value < least:
            raise self.error(place, f"must be a whole number of at least {least}, got {value!r}")
        return value

    def tuning(
        self, content: Any, methods: Mapping[str, Overrides], seeds: Sequence[int]
    ) -> Tuning | None:
        if content is None:
            return None
        if not isinstance(content, dict):
            raise self.error("tune", f"must be a mapping with trials and seeds, got {content!r}")
        self.require_known(content, [*_TUNING_KEYS, *methods], "tune")
        for name in ("trials", "seeds"):
            if content.get(name) is None:
                raise self.error(f"tune.{name}", "is missing")

        trials = self.whole(content["trials"], "tune.trials", 1)
        own_seeds = self.seeds(content["seeds"], "tune.seeds")
        if both := sorted(set(own_seeds) & set(seeds)):
            raise self.error("tune.seeds", f"has {both[0]}, which is a seed of the results too")
        common = self._choices(content.get("common"), "tune.common")
        choices = {
            name: {**common, **self._choices(content.get(name), f"tune.{name}")} for name in methods
        }
        if not any(choices.values()):
            raise self.error(
                "tune", "has no choices for any method; list values per method or in common"
            )
        seed = self.whole(content.get("seed", 0), "tune.seed", 0)
        overrides = self.overrides(content.get("overrides"), "tune.overrides")
        return Tuning(trials, own_seeds, seed, choices, overrides)

    def updates_from(
        self, content: Any, methods: Mapping[str, Overrides], tuning: Tuning | None
    ) -> str | None:
        if content is None:
            return None
        if content not in methods:
            raise self.error("updates_from", f"must be one of the methods, got {content!r}")
        if tuning is not None:
            raise self.error("updates_from", "cannot be combined with tune; leave one of them out")
        return str(content)

    def require_one_value(
        self,
        methods: Mapping[str, Overrides],
        grid: Mapping[str, list[Any]],
        shared: Overrides,
        tuning: Tuning | None,
    ) -> None:
        """Refuse a key of the grid that is also set elsewhere."""
        places = {f"methods.{name}": keys for name, keys in methods.items()}
        places["overrides"] = shared
        if tuning is not None:
            places |= {f"tune.{name}": keys for name, keys in tuning.choices.items()}
            places["tune.overrides"] = tuning.overrides
        for place, keys in places.items():
            if both := [key for key in grid if key in keys]:
                raise self.error(f"grid.{both[0]}", f"is set by {place} too; remove one of them")
