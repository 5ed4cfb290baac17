"""A sweep's file: its content, and how it is read and checked."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from flsuite.commands.request import read_config
from flsuite.common.arguments import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    SmallProbability,
)
from flsuite.common.errors import FlsuiteError, likeliest

Overrides = dict[str, Any]
"""A mapping from dotted keys of a config, without ``init_args``, to values."""
Choices = dict[str, list[Any]]
"""A mapping from dotted keys of a config, without ``init_args``, to lists of values."""

_REQUIRED = ("config", "seeds", "methods")
KEYS = (*_REQUIRED, "grid", "tune", "overrides", "workers", "updates_from", "until", "together")
_TUNING_KEYS = ("trials", "seeds", "seed", "common", "overrides")
# The sweep itself sets these keys, one value per run.
_SWEEP_KEYS = ("config", "seed_everything", "run_dir", "ckpt_path", "trainer.run_dir")
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)


@dataclass(frozen=True)
class Tuning(Settings):
    """How methods are tuned before their results.

    Attributes:
        trials: Maximum number of trials per method and grid point.
        seeds: Seeds of the trials. They differ from the seeds of the results.
        seed: Determines which trials are drawn.
        choices: The values that a trial may draw, by method and key.
        overrides: Changes of the trials alone, such as fewer rounds.
    """

    owner = "tune"

    trials: PositiveInt
    seeds: tuple[NonNegativeInt, ...]
    seed: NonNegativeInt
    choices: dict[str, Choices]
    overrides: Overrides = field(default_factory=dict)


@dataclass(frozen=True)
class _Until(Settings):
    """When a sweep has enough seeds.

    It adds seeds until the interval of each method's paired difference from the first method
    excludes zero, corrected for looking after every seed.

    Attributes:
        seeds: Maximum number of seeds.
        width: Also stop when the interval is at most this wide.
        alpha: Probability of any wrong decision that a method differs.
    """

    owner = "until"

    seeds: PositiveInt = 20
    width: PositiveFloat | None = None
    alpha: SmallProbability = 0.05


@dataclass(frozen=True)
class Sweep(Settings):
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
        until: When there are enough seeds, if seeds are added.
        together: ``seeds`` to train the cells that differ only in the seed in one process, with the
            clients of all of them in one stack.
    """

    owner = "sweep"

    name: str
    config: Path
    base: dict[str, Any]
    seeds: tuple[NonNegativeInt, ...]
    methods: dict[str, Overrides]
    grid: Choices
    shared: Overrides = field(default_factory=dict)
    workers: PositiveInt = 1
    tuning: Tuning | None = None
    updates_from: str | None = None
    until: _Until | None = None
    together: Literal["seeds"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.updates_from not in (None, *self.methods):
            raise FlsuiteError(
                f"updates_from must be one of the methods, got {self.updates_from!r}"
            )
        if self.until is not None:
            if len(self.methods) < 2:
                raise FlsuiteError("until needs two methods, because it compares them")
            if self.until.seeds < max(2, len(self.seeds)):
                raise FlsuiteError(
                    f"until.seeds is {self.until.seeds}, but there are {len(self.seeds)} seeds "
                    "already; it is the maximum, at least 2"
                )
        places = {f"methods.{name}": keys for name, keys in self.methods.items()}
        places["overrides"] = self.shared
        if self.tuning is not None:
            if self.updates_from is not None:
                raise FlsuiteError("updates_from does not go with tune; leave one of them out")
            if both := sorted({*self.tuning.seeds} & {*self.seeds}):
                raise FlsuiteError(f"tune.seeds has {both[0]}, which is a seed of the results too")
            places |= {f"tune.{name}": keys for name, keys in self.tuning.choices.items()}
            places["tune.overrides"] = self.tuning.overrides
        for place, keys in places.items():
            if twice := [key for key in self.grid if key in keys]:
                raise FlsuiteError(f"grid.{twice[0]} is set by {place} too; remove one of them")


def read_sweep(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    workers: int | None = None,
    until: str | None = None,
) -> Sweep:
    """Read a sweep's file.

    Args:
        path: The file.
        overrides: More changes for all cells. They win over the file.
        workers: Cells that run at the same time. Default: as in the file, else one.
        until: ``decided`` to add seeds. Default: as in the file.

    Raises:
        FlsuiteError: If the file has an error. The message names the place.
    """
    path = Path(path)
    content = read_config(path)
    try:
        _require_keys(content, KEYS, _REQUIRED, "")
        config, methods = _config(content["config"], path), _methods(content["methods"])
        if "grid" in content and not content["grid"]:
            raise FlsuiteError("grid is empty; map keys to lists of values, or leave grid out")
        return Sweep(
            name=path.stem,
            config=config,
            base=read_config(config),
            seeds=tuple(_list(content["seeds"], "seeds", "whole numbers")),
            methods=methods,
            grid=_choices(content.get("grid"), "grid"),
            shared={
                **_overrides(content.get("overrides"), "overrides"),
                **_overrides(overrides, "the command line"),
            },
            workers=content.get("workers", 1) if workers is None else workers,
            tuning=_tuning(content.get("tune"), methods),
            updates_from=content.get("updates_from"),
            until=_until(content.get("until", until)),
            together=content.get("together"),
        )
    except FlsuiteError as error:
        raise FlsuiteError(f"{path}: {error}") from error


def _require_keys(
    content: Mapping[str, Any], known: Collection[str], required: Collection[str], place: str
) -> None:
    """Refuse a part of the file with an unknown key, or without a required one."""
    for key in content:
        if key not in known:
            near = likeliest(str(key), known, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            if key in ("model", "data", "trainer", "seed_everything"):
                hint = "the config of a run is for flsuite fit --config"
            raise FlsuiteError(f"{place} has an unknown key {key!r}; {hint}".strip())
    for name in required:
        if content.get(name) is None:
            raise FlsuiteError(f"{place}.{name} is missing".removeprefix("."))


def _config(name: Any, path: Path) -> Path:
    """Return the path of the config, relative to the working folder or to the sweep's file."""
    if not isinstance(name, str):
        raise FlsuiteError(f"config must be the path of a config, got {name!r}")
    places = list(dict.fromkeys((Path(name), path.parent / name)))
    for config in places:
        if config.is_file():
            return config
    raise FlsuiteError(f"config names no file: {' or '.join(map(str, places))}")


def _methods(content: Any) -> dict[str, Overrides]:
    if not isinstance(content, dict) or not content:
        raise FlsuiteError(
            "methods must map at least one name to the keys that it changes, such as FedProx: "
            "{trainer.aggregator: FedProx}"
        )
    for name in content:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TUNING_KEYS:
            raise FlsuiteError(
                f"methods {name!r} cannot be a name; use letters, digits and . _ + -, but none of "
                + ", ".join(_TUNING_KEYS)
            )
    return {name: _overrides(keys, f"methods.{name}") for name, keys in content.items()}


def _overrides(content: Any, place: str) -> Overrides:
    """Return changes of the config. An argument has the same key with and without init_args."""
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise FlsuiteError(f"{place} must map keys of the config to values, got {content!r}")
    overrides: Overrides = {}
    for key, value in content.items():
        if not isinstance(key, str):
            raise FlsuiteError(f"{place} {key!r} is not a key of a config")
        parts = [part for part in key.split(".") if part != "init_args"]
        plain = ".".join(parts[:-1] if parts[-1:] == ["class_path"] else parts)
        if plain in _SWEEP_KEYS or not plain:
            raise FlsuiteError(f"{place} cannot set {key!r}: the sweep sets it for each run")
        overrides[plain] = value
    return overrides


def _choices(content: Any, place: str) -> Choices:
    choices = _overrides(content, place)
    return {key: _list(values, f"{place}.{key}", "values") for key, values in choices.items()}


def _list(content: Any, place: str, of: str) -> list[Any]:
    """Return a list, which must have values and none of them twice."""
    if not isinstance(content, list) or not content:
        raise FlsuiteError(f"{place} must be a list of {of}, got {content!r}")
    for position, value in enumerate(content):
        if value in content[:position]:
            raise FlsuiteError(f"{place} has {value!r} twice")
    return content


def _until(content: Any) -> _Until | None:
    if content is None:
        return None
    if content == "decided":
        return _Until()
    known = [field.name for field in fields(_Until)]
    if not isinstance(content, dict):
        raise FlsuiteError(
            f"until must be decided, or a mapping with {', '.join(known)}, got {content!r}"
        )
    _require_keys(content, known, (), "until")
    return _Until(**content)


def _tuning(content: Any, methods: Collection[str]) -> Tuning | None:
    if content is None:
        return None
    if not isinstance(content, dict):
        raise FlsuiteError(f"tune must be a mapping with trials and seeds, got {content!r}")
    _require_keys(content, [*_TUNING_KEYS, *methods], ("trials", "seeds"), "tune")
    common = _choices(content.get("common"), "tune.common")
    choices = {name: common | _choices(content.get(name), f"tune.{name}") for name in methods}
    if not any(choices.values()):
        raise FlsuiteError(
            "tune has no choices for any method; list values per method or in common"
        )
    return Tuning(
        trials=content["trials"],
        seeds=tuple(_list(content["seeds"], "tune.seeds", "whole numbers")),
        seed=content.get("seed", 0),
        choices=choices,
        overrides=_overrides(content.get("overrides"), "tune.overrides"),
    )
