"""Groups of runs that differ in nothing but the seed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flsuite.analysis.axes import on_common_grid, require_axis
from flsuite.analysis.runs import curve, is_metrics, read_metrics
from flsuite.errors import FlsuiteError, one_line

__all__ = ["Group", "find_runs", "group_runs", "seed_of"]

Flat = dict[str, Any]

_CALLBACKS = ("callbacks", "stopping")  # settings that are lists of callbacks


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

    def curves(self, metric: str, split: str, x: str = "round") -> pd.DataFrame:
        """Return the global score, one column per run.

        Args:
            metric: The score.
            split: ``test`` or ``val``.
            x: The axis, whose points are the rows. Runs have the same rounds, but not the same
                points on another axis. There, the rows are the points of all runs in the range that
                every run covers, and a run's value is its last one at or before a point.

        Raises:
            FlsuiteError: If the axis does not exist, or a run has not noted it.
        """
        for folder, table in self.runs.items():
            require_axis(x, table, folder)
        curves = {folder: curve(table, metric, split, x=x) for folder, table in self.runs.items()}
        return pd.DataFrame(curves) if x == "round" else on_common_grid(curves)


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Return the run folders among and below ``places``.

    A ``metrics.csv`` of another kind, such as that of Lightning's CSVLogger, is passed over.

    Raises:
        FlsuiteError: If there are none.
    """
    roots = [Path(place) for place in places]
    tables = {table.resolve() for root in roots for table in root.rglob("metrics.csv")}
    folders = sorted(table.parent for table in tables if is_metrics(table))
    if not folders:
        raise FlsuiteError(
            f"no run below {', '.join(map(str, roots))}: name folders that hold metrics.csv of "
            "flsuite fit"
        )
    return folders


def group_runs(folders: Iterable[Path]) -> list[Group]:
    """Group runs by their settings, and label each group with what differs.

    Raises:
        FlsuiteError: If a folder is not a run's, or no run has a finished round.
    """
    by_settings: dict[str, Group] = {}
    for folder in folders:
        shared = _without_open({k: v for k, v in _settings(folder).items() if k != "seed"})
        metrics = read_metrics(folder)
        if len(metrics):  # else the first round is not done yet
            group = by_settings.setdefault(yaml.safe_dump(shared), Group(dict(_flatten(shared))))
            group.runs[folder] = metrics

    groups = list(by_settings.values())
    if not groups:
        raise FlsuiteError("none of these runs has a finished round yet")
    for group in groups:
        group.label = _label(group.settings, [other.settings for other in groups])
    return sorted(groups, key=lambda group: group.label)


def seed_of(folder: Path) -> int | None:
    """Return a run's seed."""
    seed = _settings(folder).get("seed")
    return None if seed is None else int(seed)


def _settings(folder: Path) -> dict[str, Any]:
    """Read all that decides a run's result."""
    path = folder / "settings.yaml"
    if not path.is_file():
        raise FlsuiteError(
            f"{folder} has no settings.yaml: it is not the folder of a run, or an earlier version "
            "of flsuite made it; name other folders, or run it again"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FlsuiteError(f"{path} is not valid YAML ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise FlsuiteError(f"{path} does not hold the settings of a run; leave the folder out")
    return content


def _without_open(node: Any) -> Any:
    """Leave out settings that are left open: ``None``, and a list of callbacks without any.

    A run that is older than such a setting does not have it, and is the same experiment.
    """
    if isinstance(node, list):
        return [_without_open(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    return {
        key: _without_open(value)
        for key, value in node.items()
        if value is not None and not (key in _CALLBACKS and not value)
    }


def _flatten(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield path and value of each setting, with a class before its parameters."""
    if isinstance(node, Mapping) and "class_path" in node:
        yield path, _Class(node["class_path"])
        for key, value in (node.get("init_args") or {}).items():
            # A mapping of plain values is one value: another group may have a word in its place.
            yield from _flatten(repr(value) if _is_plain(value) else value, f"{path}.{key}")
    elif isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flatten(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        # Objects in a list go by their class names, so that labels can name them.
        for name, item in zip(_names(node), node, strict=True):
            yield from _flatten(item, f"{path}.{name}")
    else:
        yield path, repr(node) if isinstance(node, (list, Mapping)) else node


def _is_plain(node: Any) -> bool:
    """Return whether an argument is a mapping of values that have no parts."""
    return (
        isinstance(node, Mapping)
        and "class_path" not in node
        and not any(isinstance(value, (Mapping, list)) for value in node.values())
    )


def _names(items: Sequence[Any]) -> list[str]:
    """Return a name per item: its class where it has one, numbered from the second on."""
    names: list[str] = []
    for item in items:
        path = item.get("class_path", "") if isinstance(item, Mapping) else ""
        name = str(path).rsplit(".", 1)[-1]
        count = sum(other.split("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count else name)
    return names


def _label(own: Flat, all_settings: Sequence[Flat]) -> str:
    """Return the settings in which a group differs from the others, as text.

    A parameter is compared only among groups that share the class it belongs to.
    """
    keys = [
        key
        for key in dict.fromkeys(key for settings in all_settings for key in settings)
        if _differs(key, own, all_settings)
    ]

    parts = []
    for key in keys:
        value = own.get(key)
        last = key.rsplit(".", 1)[-1]
        name = last if sum(other.rsplit(".", 1)[-1] == last for other in keys) == 1 else key
        parts.append(value.rsplit(".", 1)[-1] if isinstance(value, _Class) else f"{name}={value}")
    return ", ".join(parts) or "all"


def _differs(key: str, own: Flat, all_settings: Sequence[Flat]) -> bool:
    """Return whether groups with the same owner of this setting differ in it."""
    peers = [other for other in all_settings if _same_owners(key, own, other)]
    return (
        any(key in other for other in peers) and len({repr(other.get(key)) for other in peers}) > 1
    )


def _same_owners(key: str, own: Flat, other: Flat) -> bool:
    """Return whether both groups have the same classes on the way to this setting."""
    parts = key.split(".")
    owners = [".".join(parts[:n]) for n in range(1, len(parts))]
    return all(own.get(owner) == other.get(owner) for owner in owners)
