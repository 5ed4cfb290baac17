"""Groups of runs that differ only in the seed."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flsuite.analysis.labels import (
    Flat,
    Variation,
    data_texts,
    flatten,
    label_of,
    method_of,
    partition_of,
)
from flsuite.analysis.runs import is_metrics, read_metrics
from flsuite.common.errors import FlsuiteError
from flsuite.runs.record import read_settings

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


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Return the run folders among and below ``places``.

    Other kinds of ``metrics.csv``, such as from Lightning's CSVLogger, are skipped. The trials of a
    sweep are skipped too, because they are not results, unless a place names their folder.

    Raises:
        FlsuiteError: If there are no runs.
    """
    roots = [Path(place) for place in places]
    tables = {
        table.resolve()
        for root in roots
        for table in root.rglob("metrics.csv")
        if not _is_trial(table, root)
    }
    folders = sorted(table.parent for table in tables if is_metrics(table))
    if not folders:
        other = f"; {min(tables)} is damaged, or not from flsuite" if tables else ""
        raise FlsuiteError(
            f"no run below {', '.join(map(str, roots))}: name folders with a metrics.csv of "
            f"flsuite fit{other}"
        )
    return folders


def group_runs(folders: Iterable[Path]) -> list[Group]:
    """Group runs by their settings, and label each group with its differing settings.

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
    return sorted(groups, key=lambda group: group.label)


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
            group.label = ", ".join([cell[0], *data_texts(group.settings, variation)])


def _cell_of(group: Group) -> tuple[str, str] | None:
    """Return the method and the grid point if all runs belong to one cell of a sweep."""
    folders = {folder.parent.name for folder in group.runs if folder.name.startswith("seed-")}
    matches = [match for name in folders if (match := _CELL.fullmatch(name))]
    if len(matches) != 1 or any(not f.name.startswith("seed-") for f in group.runs):
        return None
    return matches[0]["method"], matches[0]["point"] or ""


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
    """Return the settings without unset ones: ``None``, and empty lists of callbacks.

    Runs from before a class had such an argument are the same experiment.
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
