"""Which runs are the same experiment: those whose configs differ in nothing that decides the result but the seed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from flsuite.analysis.runs import curve, read_metrics
from flsuite.errors import FlsuiteError

__all__ = ["Group", "find_runs", "group_runs", "seed_of"]

_NOT_THE_EXPERIMENT = (  # what may differ between runs of one experiment
    "seed_everything",
    "seed",
    "run_dir",
    "ckpt_path",
    "config",
    "plugins",
    "trainer.logger",
    "trainer.engine",
    "trainer.enable_progress_bar",
    "trainer.run_dir",
)
_PLACES = {"root", "download"}  # of any data module, wrapped or not
_OBSERVERS = {  # they change nothing
    "FlowMonitor",
    "ForestProbe",
    "GradientDissimilarity",
    "LatentSpace",
    "RoundLogger",
    "RoundProgress",
    "TaskMatrix",
}

Flat = dict[str, Any]


class _Class(str):
    """The path of a class in a config, whose name says by itself what it is."""


@dataclass
class Group:
    """Runs of one experiment.

    Attributes:
        settings: What they share, flat: ``model`` is a class's name, ``model.lr`` one of its parameters.
        label: What tells them from the other groups.
        runs: Folder to its metrics.
    """

    settings: Flat
    label: str = ""
    runs: dict[Path, pd.DataFrame] = field(default_factory=dict)

    def curves(self, metric: str, split: str) -> pd.DataFrame:
        """Round by run: the global score."""
        return pd.DataFrame(
            {folder: curve(table, metric, split) for folder, table in self.runs.items()}
        )


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Run folders among and below ``places``.

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
    """Group by config, and label each group by what tells it apart."""
    groups: dict[str, Group] = {}
    for folder in folders:
        settings = flat_settings(folder)
        key = repr(sorted(settings.items(), key=lambda item: item[0]))
        table = read_metrics(folder)
        if len(table):  # a run whose first round is not done yet
            groups.setdefault(key, Group(settings)).runs[folder] = table
    found = list(groups.values())
    if not found:
        raise FlsuiteError("none of these runs has a finished round yet")
    for group in found:
        group.label = _label(group.settings, [other.settings for other in found])
    return sorted(found, key=lambda group: group.label)


def flat_settings(folder: Path) -> Flat:
    """A run's config without what does not belong to the experiment, flat."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise FlsuiteError(f"{folder} is not the folder of a run: it has no config.yaml")
    content = yaml.safe_load(path.read_text()) or {}
    return dict(_flatten(content))


def seed_of(folder: Path) -> int | None:
    """A run's seed, as its config says it."""
    content = yaml.safe_load((folder / "config.yaml").read_text()) or {}
    seed = content.get("seed_everything", content.get("seed"))
    return None if seed is None else int(seed)


def _flatten(node: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if path in _NOT_THE_EXPERIMENT or (
        path.startswith("data.") and path.rpartition(".")[2] in _PLACES
    ):
        return
    if path == "trainer.callbacks":
        node = [
            c for c in node or [] if str(c.get("class_path")).rsplit(".", 1)[-1] not in _OBSERVERS
        ]
        if not node:
            return
    if isinstance(node, Mapping) and "class_path" in node:
        yield _short(path), _Class(node["class_path"])
        for key, value in (node.get("init_args") or {}).items():
            yield from _flatten(value, f"{path}.init_args.{key}")
    elif isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flatten(value, f"{path}.{key}" if path else str(key))
    elif node is not None:  # what is left open, or was not there to be set when the run was made
        yield _short(path), repr(node) if isinstance(node, (list, Mapping)) else node


def _short(path: str) -> str:
    return path.replace(".init_args", "")


def _label(own: Flat, everybody: Sequence[Flat]) -> str:
    """Settings in which groups differ; a parameter only among groups that share the class it belongs to."""
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
