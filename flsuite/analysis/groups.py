"""Runs that differ in nothing but the seed, and their labels."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flsuite.analysis.runs import is_metrics, read_metrics
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import read_settings, read_sweep_record

Flat = dict[str, Any]
"""Settings by path: ``model`` is a class, ``model.lr`` one of its parameters."""


class _Class(str):
    """The path of a class. Labels show only the class name."""


def flatten(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield path and value of each setting, with a class before its parameters."""
    match node:
        case {"class_path": name}:
            yield path, _Class(name)
            arguments = node.get("init_args")
            for key, value in arguments.items() if isinstance(arguments, Mapping) else ():
                # A mapping of plain values is one value: another group may have a word there.
                yield from flatten(repr(value) if _is_plain(value) else value, f"{path}.{key}")
        case {} if node:
            for key, value in node.items():
                yield from flatten(value, f"{path}.{key}" if path else str(key))
        case list() if any(isinstance(item, Mapping) for item in node):
            # Objects in a list are keyed by class name, so that labels can name them.
            for name, item in zip(_names(node), node, strict=True):
                yield from flatten(item, f"{path}.{name}")
        case list() | {}:
            yield path, repr(node)
        case _:
            yield path, node


def _is_plain(node: Any) -> bool:
    """Return whether an argument is a mapping of plain values."""
    match node:
        case {"class_path": _}:
            return False
        case {}:
            return not any(isinstance(value, (Mapping, list)) for value in node.values())
    return False


def _names(items: Sequence[Any]) -> list[str]:
    """Return a name per item: its class if it has one, numbered from the second on."""
    names: list[str] = []
    for item in items:
        path = item.get("class_path", "") if isinstance(item, Mapping) else ""
        name = str(path).rsplit(".", 1)[-1]
        count = sum(other.split("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count else name)
    return names


_PLAIN = {"Mean", "MixedMean", "Objective"}  # default parts of an algorithm


class Variation:
    """The settings in which groups differ.

    A parameter is compared only among groups that share the classes it belongs to.

    Args:
        all_settings: The settings of each group.
    """

    def __init__(self, all_settings: Sequence[Flat]) -> None:
        # The algorithm first, because it is what most tables compare.
        self.keys = sorted(_keys(all_settings), key=lambda key: key.split(".")[0] != "aggregator")
        self._values: dict[tuple[str, ...], set[str]] = {}
        for own in all_settings:
            for key in self.keys:
                self._values.setdefault(self._peers(key, own), set()).add(repr(own.get(key)))

    def differs(self, key: str, own: Flat) -> bool:
        """Return whether groups with the same owner of this setting differ in it."""
        return len(self._values[self._peers(key, own)]) > 1

    def texts(self, own: Flat, keep: Callable[[str], bool] = lambda key: True) -> list[str]:
        """Return the settings in which a group differs as text, if ``keep`` accepts their path."""
        keys = [key for key in self.keys if keep(key) and self.differs(key, own)]
        return [
            self.algorithm(own) if key == "aggregator" else setting_text(key, own.get(key), keys)
            for key in keys
        ]

    def algorithm(self, own: Flat) -> str:
        """Return the aggregator with its non-default parts, except those that differ."""
        names = [_last(own.get("aggregator", "run"))]
        for key, value in own.items():
            owner, _, part = key.partition(".")
            is_part = owner == "aggregator" and part.removeprefix("transforms.").isidentifier()
            if is_part and isinstance(value, _Class) and not self.differs(key, own):
                names += [_last(value)] if _last(value) not in _PLAIN else []
        return " + ".join(names)

    def _peers(self, key: str, own: Flat) -> tuple[str, ...]:
        return (key, *(repr(own.get(owner)) for owner in _owners(key)))


def label_of(own: Flat, variation: Variation) -> str:
    """Return the settings in which a group differs from the others, as text."""
    return ", ".join(variation.texts(own)) or "all"


def method_of(own: Flat, variation: Variation) -> str:
    """Return the aggregator, and other differing settings outside of the data."""
    parts = variation.texts(own, lambda key: key != "aggregator" and not _is_data(key))
    return ", ".join([variation.algorithm(own), *parts])


def partition_of(own: Flat, variation: Variation) -> str:
    """Return the partition, and other differing settings of the data.

    The first parameter of a partition, such as alpha, is always named.
    """
    place = next((key for key in own if _is_data(key) and _last(key) == "partition"), None)
    parts = variation.texts(
        own, lambda key: _is_data(key) and not f"{key}.".startswith(f"{place}.")
    )
    if place is None:
        return ", ".join(parts) or _last(own.get("data", "data"))

    named = [key for key in own if key.startswith(f"{place}.")]
    shown = named[:1] + [key for key in named[1:] if variation.differs(key, own)]
    values = ", ".join(f"{_last(key)}={own[key]}" for key in shown)
    name = _last(own[place] or "IID")  # the default of every data module
    return ", ".join([f"{name}({values})" if values else name, *parts])


def setting_text(key: str, value: Any, keys: Iterable[str]) -> str:
    """Return a setting as text, with its whole path if another key has the same name."""
    if isinstance(value, _Class):
        return shown_value(value)
    if (key, value) == ("engine", None):  # only an engine with stacks is a setting
        return "without stacks"
    is_unique = [_last(other) for other in keys].count(_last(key)) == 1
    name = _last(key) if is_unique else key
    return f"{name}={shown_value(value)}"


def shown_value(value: Any) -> str:
    """Return a setting's value as text on one line. For a class, it is the name."""
    return _last(value) if isinstance(value, _Class) else " ".join(str(value).split())


def _keys(all_settings: Sequence[Flat]) -> list[str]:
    return list(dict.fromkeys(key for settings in all_settings for key in settings))


def _is_data(key: str) -> bool:
    return key.split(".")[0] == "data"


def _last(path: object) -> str:
    """Return the last part of the path of a class or a setting."""
    return str(path).rsplit(".", 1)[-1]


def _owners(key: str) -> list[str]:
    """Return the paths of the classes that a setting may belong to."""
    if key == "monitor":  # its default depends on the scores, and on who has a model of its own
        return ["model", "model.private", "aggregator", "data.val_fraction"]
    parts = key.split(".")
    owners = [".".join(parts[:n]) for n in range(1, len(parts))]
    # A digest tells data of one class apart. Another class has other content anyway.
    return [*owners, f"{owners[-1]}.data"] if parts[1:] and parts[-1] == "content" else owners


_CELL = re.compile(r"(?P<method>.+?)(?:-(?P<point>[\w.]+=.*))?-[0-9a-f]{8}")
"""The folder name of a sweep's cell: METHOD, the grid values if any, and a hash."""
# The seed may determine the weights of a given model, and who attacks.
_SEED_SETTINGS = ("seed", "given_weights", "attackers", "forked_from")
_CALLBACKS = ("callbacks", "stopping")  # settings that are lists of callbacks


@dataclass
class Group:
    """Runs of one experiment.

    Attributes:
        settings: The settings that the runs share, by path: ``model`` is a class, ``model.lr`` one
            of its parameters.
        label: The settings in which the group differs from the other groups. In a sweep, the name
            of the method, and the data where they differ.
        method: The aggregator, and other differing settings outside of the data.
        partition: The partition, and other differing settings of the data.
        runs: Metrics by run folder.
        seeds: Seeds by run folder, ``None`` if unknown.
    """

    settings: Flat
    label: str = ""
    method: str = ""
    partition: str = ""
    runs: dict[Path, pd.DataFrame] = field(default_factory=dict)
    seeds: dict[Path, int | None] = field(default_factory=dict)

    @property
    def monitor(self) -> str:
        """Return the validation score by which the runs pick a round."""
        return monitor_of(self.settings)


def tables_of(groups: Iterable[Group]) -> list[pd.DataFrame]:
    """Return the metrics of all runs of some groups."""
    return [table for group in groups for table in group.runs.values()]


_WANTED = "name folders with a metrics.csv of flsuite fit"


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Return the run folders among and below ``places``.

    Other kinds of ``metrics.csv``, such as from Lightning's CSVLogger, are skipped. The trials of a
    sweep are skipped too, because they are not results, unless a place names their folder.

    Raises:
        FlsuiteError: If there are no runs, or a place does not exist.
    """
    roots = [Path(place) for place in places]
    if gone := [str(root) for root in roots if not root.exists()]:
        raise FlsuiteError(f"there is no folder {', '.join(gone)}: {_WANTED}")
    tables = {
        table.resolve()
        for root in roots
        for table in root.rglob("metrics.csv")
        if not _is_trial(table, root)
    }
    folders = sorted(table.parent for table in tables if is_metrics(table))
    if not folders:
        other = f"; {min(tables)} is damaged, or not from flsuite" if tables else ""
        raise FlsuiteError(f"no run below {', '.join(map(str, roots))}: {_WANTED}{other}")
    return folders


def group_runs(folders: Iterable[Path]) -> list[Group]:
    """Group runs by their settings, and label each group with its differing settings.

    Groups are sorted by label. Methods of a sweep keep the order of its file.

    Raises:
        FlsuiteError: If a folder is not a run, or no run has a finished round.
    """
    by_settings: dict[str, Group] = {}
    for folder in folders:
        metrics = read_metrics(folder)
        if metrics.empty:  # the first round is not done yet
            continue
        settings = read_settings(folder)
        seed, shared = settings.get("seed"), _without_seed(settings)
        group = by_settings.setdefault(_text(shared), Group(dict(flatten(shared))))
        group.runs[folder] = metrics
        group.seeds[folder] = None if seed is None else int(seed)

    groups = list(by_settings.values())
    if not groups:
        raise FlsuiteError("none of these runs has a finished round yet")
    variation = Variation([group.settings for group in groups])
    for group in groups:
        group.label = label_of(group.settings, variation)
        group.method = method_of(group.settings, variation)
        group.partition = partition_of(group.settings, variation)
    _take_names_of_sweep(groups, variation)
    return sorted(groups, key=lambda group: (_place_in_sweep(group), group.label))


def monitor_of(settings: Mapping[str, Any]) -> str:
    """Return the validation score by which a run with these settings picks a round."""
    return str(settings.get("monitor") or "accuracy")


def experiment_hash(settings: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that all runs of a group share."""
    return hashlib.sha256(_text(_without_seed(settings)).encode()).hexdigest()[:8]


def _take_names_of_sweep(groups: list[Group], variation: Variation) -> None:
    """Name methods as in their sweep, so that tuned values do not split a method.

    Grid values outside of the data then become part of the partition's name, which is the grid
    point. If two sweeps use the same name for different experiments, these keep the names from
    their settings.
    """
    names = [(group.method, group.partition) for group in groups]
    cells = [_cell_of(group) for group in groups]
    short = [(cell[0], name[1]) if cell else name for cell, name in zip(cells, names, strict=True)]
    full = [
        (pair[0], cell[1] or pair[1]) if cell and short.count(pair) > 1 else pair
        for cell, pair in zip(cells, short, strict=True)
    ]
    for group, name, cell, pair in zip(groups, names, cells, full, strict=True):
        group.method, group.partition = name if full.count(pair) > 1 else pair
        if cell and len(groups) > 1 and (group.method, group.partition) == (cell[0], name[1]):
            group.label = ", ".join([cell[0], *variation.texts(group.settings, _is_data)])


def _cell_of(group: Group) -> tuple[str, str] | None:
    """Return the method and the grid point if all runs belong to one cell of a sweep."""
    folders = {folder.parent.name for folder in group.runs if folder.name.startswith("seed-")}
    matches = [match for name in folders if (match := _CELL.fullmatch(name))]
    if len(matches) != 1 or any(not f.name.startswith("seed-") for f in group.runs):
        return None
    return matches[0]["method"], matches[0]["point"] or ""


def _place_in_sweep(group: Group) -> int:
    """Return the position of a group's method in the file of its sweep, and 0 outside of sweeps."""
    cell, folder = _cell_of(group), next(iter(group.runs))
    methods = read_sweep_record(folder.parent.parent).get("methods", []) if cell else []
    return methods.index(cell[0]) if cell and cell[0] in methods else 0


def _text(settings: Any) -> str:
    """Return settings as text that does not depend on their order."""
    return yaml.dump(settings, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def _is_trial(table: Path, root: Path) -> bool:
    """Return whether a run is below a folder ``tuning`` that is itself below the root."""
    parents = [root / part for part in table.relative_to(root).parents]
    return any(p.name == "tuning" and (p.parent / "tuning.csv").is_file() for p in parents[:-1])


def _without_seed(settings: Mapping[str, Any]) -> Any:
    """Return the settings that runs of one group share."""
    return _without_open({k: v for k, v in settings.items() if k not in _SEED_SETTINGS})


def _without_open(node: Any) -> Any:
    """Return the settings that are set: not ``None``, and no empty list of callbacks.

    Runs from before a class had such an argument are the same experiment.
    """
    match node:
        case list():
            return [_without_open(item) for item in node]
        case {}:
            return {
                key: _without_open(value)
                for key, value in node.items()
                if value is not None and not (key in _CALLBACKS and not value)
            }
    return node
