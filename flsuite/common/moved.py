"""Names of version 0.2 that have moved. Configs, runs and code may still use them."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pkgutil import resolve_name
from types import CodeType, ModuleType
from typing import Any

log = logging.getLogger("flsuite")

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

# Files that have become part of another one, by the folder and the file of today.
_MERGED = {
    "aggregators": {
        "asynchronous": "fedasync fedbuff",
        "fedavg": "baselines fedprox",
        "uplink": "chain",
    },
    "aggregators.attacks": {
        "batches": "backdoor label_flip",
        "updates": "alie collusion compose free_rider inner_product noise scaled_update sign_flip",
    },
    "aggregators.exchange": {
        "quantize": "codes",
        "secure": "base",
        "sharing": "ciphers fixed_point shamir",
    },
    "aggregators.objectives": {"base": "held proximal"},
    "aggregators.rules": {
        "dense": "dense_generator",
        "fisher_forms": "layer_matrices",
        "mean": "mixing",
        "solvers": "solvers.blocks solvers.selection",
    },
    "aggregators.rules.robust": {
        "base": "cohort",
        "centers": "centered_clipping geometric_median median norm_clipping",
        "chosen": "bucketing fltrust krum",
    },
    "aggregators.transforms": {"base": "clip_updates"},
    "analysis": {
        "clients": "confusion contribution",
        "curves": "run_figure",
        "groups": "labels",
        "listing": "notes",
        "panels": "axes",
        "report": "target",
        "runs": "tuning",
    },
    "analysis.publish.page": {"parts": "headline"},
    "callbacks": {
        "logger_links": "round_numbers",
        "loggers": "pictures",
        "monitors": "flow_monitor latent_space probe",
        "stopping": "early_stopping stop_at",
        "wandb_link": "wandb_files",
    },
    "commands": {
        "contribution": "shares worlds",
        "fork": "replay",
        "report": "report_cross",
        "request": "run_folder",
    },
    "commands.sweeps": {"plan": "tuning", "queue": "outcome"},
    "data": {"federated": "rows spec"},
    "data.datasets": {
        "csv_files": "column_scale",
        "from_dataset": "from_data_module",
        "generated": "digits synthetic",
        "table": "table_files",
        "vision": "cinic10",
    },
    "data.partitions": {
        "base": "counts",
        "dirichlet": "dirichlet_balanced dirichlet_extended dirichlet_proportions",
        "shares": "iid natural owners pathological quantity ranked sole_owner",
    },
    "federation.client": {
        "callbacks": "lr_decay",
        "devices": "allocator placement precision",
        "entries": "resident",
        "setup": "fits",
    },
    "federation.engines": {"wire": "worker"},
    "federation.schedules": {"speeds": "availability"},
    "federation.server": {"evaluation": "adaptation"},
    "flower": {"server": "engine strategy"},
    "metrics": {"scores": "continual"},
    "metrics.fisher": {
        "estimates": "columns full measuring per_sample",
        "forms": "empirical predictive",
    },
    "models": {
        "abilities": "declarations protocols",
        "autoencoders": "strides",
        "classifier": "pretrained",
        "flows": "gaussians replay",
    },
    "models.backbones": {"base": "cnn lenet mlp small", "resnets": "resnet18 resnet20"},
    "runs": {
        "checkpoint": "kept",
        "fork": "reuse",
        "rounds": "rehearsal",
        "scoring": "predictions",
        "settings": "options",
    },
    "studies.inversion": {"attack": "figure gan", "target": "knowledge"},
}
_GROUND = "arguments errors files lightning_internals messages random score_names state"
_NOW = {
    **{f"flsuite.{name}": f"flsuite.common.{name}" for name in _GROUND.split()},
    **_PACKAGES,
    **{
        f"flsuite.{folder}.{old}": f"flsuite.{folder}.{file}"
        for folder, files in _MERGED.items()
        for file, olds in files.items()
        for old in olds.split()
    },
    **{
        f"flsuite.aggregators.exchange.{name}": f"flsuite.aggregators.transforms.{name}"
        for name in ("low_rank", "quantize", "top_k")
    },
    "flsuite.aggregators.features": "flsuite.aggregators.objectives.feature_term",
    "flsuite.aggregators.objectives.control_variates": "flsuite.aggregators.scaffold",
    "flsuite.aggregators.second_model": "flsuite.aggregators.objectives.second_steps",
    "flsuite.aggregators.server_optimizers.adaptive": "flsuite.aggregators.server_optimizers",
    "flsuite.aggregators.server_optimizers.step": "flsuite.aggregators.server_optimizers",
}


def moved(name: str) -> str:
    """Return today's name of a module, or of something in it. Other names stay as they are."""
    parts = name.split(".")
    for length in range(2, len(parts) + 1):
        old, rest = ".".join(parts[:length]), parts[length:]
        if old in _NOW:
            is_exported = rest[0][:1].isupper() if rest else parts[1] in _EXPORTING
            is_of_room = old in _PACKAGES and is_exported
            new = room_of(_NOW[old]) if is_of_room else _NOW[old]
            return moved(".".join([new, *rest]))  # its file may have been merged too
    return name


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
        is_package = name in _PACKAGES
        return spec_from_loader(name, self, is_package=is_package) if moved(name) != name else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        package = old.rpartition(".")[0]
        if moved(package) == package:  # one line for a package and the modules in it
            log.warning("%s is now %s: please change the name", old, moved(old))
        if old in _PACKAGES:  # its modules and the names that it exported are in two places today
            vars(module)["__getattr__"] = lambda name: _attribute(_PACKAGES[old], name)
            vars(module)["__dir__"] = lambda: dir(import_module(moved(old)))
        else:
            sys.modules[old] = import_module(moved(old))

    def get_code(self, name: str) -> CodeType | None:  # for python -m
        loader: Any = getattr(import_module(moved(name)).__spec__, "loader", None)
        return loader.get_code(moved(name))


def _attribute(package: str, name: str) -> Any:
    try:
        return resolve_name(f"{package}.{name}")
    except AttributeError:
        return getattr(import_module(room_of(package)), name)


def accept_old_names() -> None:
    """Let imports find the modules of 0.2, with a warning that names the new one."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
