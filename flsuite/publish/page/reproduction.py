"""How to run each experiment of a report again."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flsuite.analysis.groups import Group, read_yaml
from flsuite.analysis.results import short_path

_MOST_CONFIGS = 40
_LONGEST_CONFIG = 12_000  # characters


@dataclass(frozen=True)
class Reproduction:
    """How to run an experiment again.

    Attributes:
        method: Its method.
        partition: Its partition.
        command: Lines of bash, empty for a run that was made in Python.
        config: The config, or the settings of a run that was made in Python.
        folders: Its run folders.
    """

    method: str
    partition: str
    command: str
    config: str
    folders: tuple[str, ...]


def reproductions(groups: Sequence[Group]) -> list[Reproduction]:
    """Return how to run each experiment again."""
    return [_reproduction(group, n < _MOST_CONFIGS) for n, group in enumerate(groups)]


def _reproduction(group: Group, with_config: bool) -> Reproduction:
    first, *_ = group.runs
    folders = tuple(short_path(folder) for folder in group.runs)
    config, command = _read(first / "config.yaml"), ""
    if _is_request(config):
        command = _command(group, short_path(first / "config.yaml"))
    else:
        config = _read(first / "settings.yaml")
    if len(config) > _LONGEST_CONFIG or not with_config:
        config = ""
    return Reproduction(group.method, group.partition, command, config, folders)


def _command(group: Group, config: str) -> str:
    """Return a loop over the seeds, or one command where there is a single one."""
    fit = f"flsuite fit --config {shlex.quote(config)}"
    seeds = [str(seed) for seed in group.seeds.values() if seed is not None]
    if len(seeds) < 2:
        return fit
    return f"for seed in {' '.join(seeds)}; do\n  {fit} --seed_everything $seed\ndone"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _is_request(config: str) -> bool:
    """Return whether it is a config of the command. A run made in Python leaves its settings."""
    try:
        content = read_yaml(config)
    except Exception:  # it is shown as it is
        return False
    return isinstance(content, dict) and "trainer" in content
