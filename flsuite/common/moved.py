"""Names of version 0.2 that have moved. Configs, runs and code may still use them."""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pkgutil import resolve_name
from types import CodeType, ModuleType
from typing import Any

from flsuite.common.errors import log

PACKAGES = {
    "flsuite.attacks": "flsuite.aggregators.attacks",
    "flsuite.client": "flsuite.federation.client",
    "flsuite.engines": "flsuite.federation.engines",
    "flsuite.exchange": "flsuite.aggregators.exchange",
    "flsuite.publish": "flsuite.analysis.publish",
    "flsuite.schedules": "flsuite.federation.schedules",
    "flsuite.server": "flsuite.federation.server",
    "flsuite.sweeps": "flsuite.commands.sweeps",
}
"""The packages of 0.2 by name, and where they are now."""
_EXPORTING = ("attacks", "engines", "exchange", "schedules")  # packages with names for users
_RENAMED = {"Work": "Fit"}  # of these names

# Files of 0.2 that others have taken in, by their folder. Their room exports what users name.
_GONE = """
aggregators: baselines chain features fedasync fedbuff fedprox second_model
aggregators.attacks: alie backdoor collusion compose free_rider inner_product label_flip noise
aggregators.attacks: scaled_update sign_flip
aggregators.exchange: base ciphers codes fixed_point low_rank quantize shamir top_k
aggregators.objectives: control_variates held proximal second_steps
aggregators.rules: dense_generator layer_matrices mixing
aggregators.rules.robust: bucketing centered_clipping cohort fltrust geometric_median krum median
aggregators.rules.robust: norm_clipping
aggregators.server_optimizers: adaptive step
aggregators.transforms: clip_updates
analysis: axes confusion contribution labels notes run_figure target tuning
callbacks: early_stopping flow_monitor latent_space pictures probe round_numbers stop_at wandb_files
data: rows spec
data.datasets: cinic10 column_scale digits from_data_module synthetic table_files
data.partitions: counts dirichlet_balanced dirichlet_extended dirichlet_proportions iid natural
data.partitions: owners pathological quantity ranked sole_owner
federation.client: allocator fits lr_decay placement precision resident
federation.engines: ray_worker vectorized worker
federation.schedules: availability
federation.server: adaptation
metrics: continual
metrics.fisher: columns empirical full measuring per_sample predictive
models: declarations gaussians pretrained protocols replay strides
models.backbones: cnn lenet mlp resnet18 resnet20 small
studies.inversion: figure gan knowledge
"""
_OWN_ROOMS = ("flsuite.metrics.fisher", "flsuite.studies.inversion")  # inner rooms with exports
_GROUND = "arguments errors files lightning_internals messages random score_names state"


def room_of(module: str) -> str:
    """Return the room that a module belongs to, which exports what users name."""
    return ".".join(module.split(".")[:2])


def _rows() -> Iterator[tuple[str, str]]:
    for name in _GROUND.split():
        yield f"flsuite.{name}", f"flsuite.common.{name}"
    for line in _GONE.strip().split("\n"):
        place, files = line.split(": ")
        folder = f"flsuite.{place}"
        for file in files.split():
            yield f"{folder}.{file}", folder if folder in _OWN_ROOMS else room_of(folder)


_NOW = {**PACKAGES, **dict(_rows())}


def moved(name: str) -> str:
    """Return today's name of a module, or of something in it. Other names stay as they are."""
    parts = name.split(".")
    for length in range(2, len(parts) + 1):
        old, rest = ".".join(parts[:length]), parts[length:]
        if old in _NOW:
            is_exported = rest[0][:1].isupper() if rest else parts[1] in _EXPORTING
            is_of_room = old in PACKAGES and is_exported
            new = room_of(_NOW[old]) if is_of_room else _NOW[old]
            return moved(".".join([new, *rest]))  # its file may be gone too
    return name


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
        is_package = name in PACKAGES
        return spec_from_loader(name, self, is_package=is_package) if moved(name) != name else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        package = old.rpartition(".")[0]
        if moved(package) == package:  # one line for a package and the modules in it
            log.warning("%s is now %s: please change the name", old, moved(old))
        if old in PACKAGES:  # its modules and the names that it exported are in two places today
            vars(module)["__getattr__"] = lambda name: _attribute(PACKAGES[old], name)
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
        return getattr(import_module(room_of(package)), _RENAMED.get(name, name))


def accept_old_names() -> None:
    """Let imports find the modules of 0.2, with a warning that names the new one."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
