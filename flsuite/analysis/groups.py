"""Runs of one experiment: those whose settings differ in nothing but the seed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flsuite.analysis.runs import curve, read_metrics
from flsuite.errors import FlsuiteError

__all__ = ["Group", "find_runs", "group_runs", "seed_of"]

Flat = dict[str, Any]


class _Class(str):
    """The path of a class, whose name is enough in a label."""


@dataclass
class Group:
    """Runs of one experiment.

    Attributes:
        settings: The settings that they share, flat: ``model`` is a class, ``model.lr`` one of its
            parameters.
        label: The settings in which they differ from the other groups.
        runs: Folder to metrics.
    """

    settings: Flat
    label: str = ""
    runs: dict[Path, pd.DataFrame] = field(default_factory=dict)

    def curves(self, metric: str, split: str) -> pd.DataFrame:
        """Return the global score, one row per round and one column per run."""
        return pd.DataFrame(
            {folder: curve(table, metric, split) for folder, table in self.runs.items()}
        )


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Return the run folders among and below ``places``.

    Raises:
        FlsuiteError: If there are none.
    """
    roots = [Path(place) for place in places]
    found = sorted(
        {table.parent.resolve() for root in roots for table in root.rglob("metrics.csv")}
    )
    if not found:
        raise FlsuiteError(
            f"no run below {', '.join(map(str, roots))}: name folders that hold metrics.csv of flsuite fit"
        )
    return found


def group_runs(folders: Iterable[Path]) -> list[Group]:
    """Group runs by their settings, and label each group by what differs.

    Raises:
        FlsuiteError: If a folder is not a run's, or no run has a finished round.
    """
    groups: dict[str, Group] = {}
    for folder in folders:
        everything = _settings(folder)
        settings = dict(_flatten({k: v for k, v in everything.items() if k != "seed"}))
        key = repr(sorted(settings.items(), key=lambda item: item[0]))
        table = read_metrics(folder)
        if len(table):  # a run whose first round is not done yet
            groups.setdefault(key, Group(settings)).runs[folder] = table
    labelled = list(groups.values())
    if not labelled:
        raise FlsuiteError("none of these runs has a finished round yet")
    for group in labelled:
        group.label = _label(group.settings, [other.settings for other in labelled])
    return sorted(labelled, key=lambda group: group.label)


def seed_of(folder: Path) -> int | None:
    """Return a run's seed."""
    seed = _settings(folder).get("seed")
    return None if seed is None else int(seed)


def _settings(folder: Path) -> dict[str, Any]:
    """Read all that decides a run's result."""
    path = folder / "settings.yaml"
    if not path.is_file():
        raise FlsuiteError(
            f"{folder} is not the folder of a run, or of one that an earlier version of flsuite "
            "made: it has no settings.yaml; name other folders, or run it again"
        )
    return yaml.safe_load(path.read_text()) or {}


def _flatten(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(node, Mapping) and "class_path" in node:
        yield _short(path), _Class(node["class_path"])
        for key, value in (node.get("init_args") or {}).items():
            yield from _flatten(value, f"{path}.init_args.{key}")
    elif isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flatten(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for item in node:  # callbacks, under their names
            name = str(item.get("class_path", "")).rsplit(".", 1)[-1]
            yield from _flatten(item, f"{path}.{name}")
    elif node is not None:  # None is a setting that is left open
        yield _short(path), repr(node) if isinstance(node, (list, Mapping)) else node


def _short(path: str) -> str:
    return path.replace(".init_args", "")


def _label(own: Flat, everybody: Sequence[Flat]) -> str:
    """Return the settings in which a group differs from the others, as text.

    A parameter is compared only among groups that share the class it belongs to.
    """
    keys = [
        key
        for key in dict.fromkeys(key for other in everybody for key in other)
        if _differs(key, own, everybody)
    ]
    parts = []
    for key in keys:
        value = own.get(key)
        last = key.rsplit(".", 1)[-1]
        name = last if sum(other.rsplit(".", 1)[-1] == last for other in keys) == 1 else key
        parts.append(value.rsplit(".", 1)[-1] if isinstance(value, _Class) else f"{name}={value}")
    return ", ".join(parts) or "all"


def _differs(key: str, own: Flat, everybody: Sequence[Flat]) -> bool:
    peers = [other for other in everybody if _same_owners(key, own, other)]
    return (
        any(key in other for other in peers) and len({repr(other.get(key)) for other in peers}) > 1
    )


def _same_owners(key: str, own: Flat, other: Flat) -> bool:
    parts = key.split(".")
    owners = [".".join(parts[:n]) for n in range(1, len(parts))]
    return all(own.get(owner) == other.get(owner) for owner in owners)
