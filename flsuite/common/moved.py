"""Names of version 0.2 that have moved. Configs, runs and code may still use them."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

log = logging.getLogger("flsuite")

_GROUND = (
    *("arguments", "errors", "files", "lightning_internals", "messages", "random"),
    *("score_names", "state"),
)
_FILES = {f"flsuite.{name}": f"flsuite.common.{name}" for name in _GROUND}
_PACKAGES = {
    "flsuite.attacks": "flsuite.aggregators.attacks",
    "flsuite.client": "flsuite.federation.client",
    "flsuite.engines": "flsuite.federation.engines",
    "flsuite.exchange": "flsuite.aggregators.exchange",
    "flsuite.publish": "flsuite.analysis.publish",
    "flsuite.schedules": "flsuite.federation.schedules",
    "flsuite.server": "flsuite.federation.server",
    "flsuite.sweeps": "flsuite.commands.sweeps",
}
_EXPORTING = ("attacks", "engines", "exchange", "schedules")  # packages with names for users


_MERGED = {
    "aggregators": {"fedavg": "baselines"},
    "aggregators.attacks": {
        "batches": "backdoor label_flip",
        "updates": "alie collusion free_rider inner_product noise scaled_update sign_flip",
    },
    "aggregators.exchange": {"quantize": "codes", "secure": "base"},
    "aggregators.objectives": {"base": "held proximal"},
    "aggregators.rules": {"mean": "mixing"},
    "aggregators.rules.robust": {
        "base": "cohort",
        "centers": "centered_clipping geometric_median median norm_clipping",
        "chosen": "bucketing fltrust krum",
    },
    "aggregators.transforms": {"base": "clip_updates"},
    "callbacks": {
        "logger_links": "round_numbers",
        "monitors": "flow_monitor latent_space probe",
        "stopping": "early_stopping stop_at",
        "wandb_link": "wandb_files",
    },
    "data.datasets": {
        "generated": "digits synthetic",
        "table": "table_files",
        "vision": "cinic10",
    },
    "data.partitions": {
        "base": "counts",
        "dirichlet": "dirichlet_balanced dirichlet_extended dirichlet_proportions",
        "owners": "natural sole_owner",
        "shares": "iid pathological quantity ranked",
    },
    "federation.schedules": {"speeds": "availability"},
    "models.backbones": {"resnets": "resnet18 resnet20", "small": "cnn lenet mlp"},
}
"""Files that a config may name, and the files that have become part of them, by their folder."""
_INTO = {
    f"flsuite.{folder}.{old}": f"flsuite.{folder}.{file}"
    for folder, files in _MERGED.items()
    for file, olds in files.items()
    for old in olds.split()
}


def moved(name: str) -> str:
    """Return today's name of a module, or of something in it. Other names stay as they are."""
    name = _in_its_room(name)
    parts = name.split(".")
    for length in range(3, len(parts) + 1):
        if file := _INTO.get(".".join(parts[:length])):
            return ".".join([file, *parts[length:]])
    return name


def _in_its_room(name: str) -> str:
    first, second, *rest = [*name.split("."), ""]
    old, rest = f"{first}.{second}", rest[:-1]
    if old in _FILES:
        return ".".join([_FILES[old], *rest])
    if old not in _PACKAGES:
        return name
    is_exported = rest[0][:1].isupper() if rest else second in _EXPORTING
    return ".".join([room_of(_PACKAGES[old]) if is_exported else _PACKAGES[old], *rest])


def room_of(module: str) -> str:
    """Return the room that a module belongs to, which exports what users name."""
    return ".".join(module.split(".")[:2])


def renewed(described: Any) -> Any:
    """Return the description of an object with today's name of every class."""
    if isinstance(described, dict):
        return {
            key: moved(value) if key == "class_path" and isinstance(value, str) else renewed(value)
            for key, value in described.items()
        }
    return [renewed(value) for value in described] if isinstance(described, list) else described


class _Moved(MetaPathFinder, Loader):
    """Imports a module of 0.2 as what it is today, so that both names mean the same object."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(name, self) if moved(name) != name else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        package = old.rpartition(".")[0]
        if moved(package) == package:  # one line for a package and the modules in it
            log.warning("%s is now %s: please change the name", old, moved(old))
        sys.modules[old] = import_module(moved(old))


def accept_old_names() -> None:
    """Let imports find the modules of 0.2, with a warning that names the new one."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
