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

# A file of today, and the files that it was or has taken in: in its folder, or with their folder.
_MERGED = """
aggregators.asynchronous: fedasync fedbuff
aggregators.attacks.batches: backdoor label_flip
aggregators.attacks.updates: alie collusion compose free_rider inner_product noise scaled_update
aggregators.attacks.updates: sign_flip
aggregators.exchange.quantize: codes
aggregators.exchange.secure: base
aggregators.exchange.sharing: ciphers fixed_point shamir
aggregators.fedavg: baselines fedprox
aggregators.objectives.base: proximal second_steps aggregators.second_model
aggregators.objectives.checks: held
aggregators.objectives.feature_term: aggregators.features
aggregators.rules.dense: dense_generator
aggregators.rules.fisher_forms: layer_matrices
aggregators.rules.mean: mixing
aggregators.rules.robust.base: cohort
aggregators.rules.robust.centers: centered_clipping geometric_median median norm_clipping
aggregators.rules.robust.chosen: bucketing fltrust krum
aggregators.rules.solvers: aggregators.rules.solvers.blocks aggregators.rules.solvers.selection
aggregators.scaffold: aggregators.objectives.control_variates
aggregators.server_optimizers: aggregators.server_optimizers.adaptive
aggregators.server_optimizers: aggregators.server_optimizers.step
aggregators.transforms.base: clip_updates
aggregators.transforms.low_rank: aggregators.exchange.low_rank
aggregators.transforms.quantize: aggregators.exchange.quantize
aggregators.transforms.top_k: aggregators.exchange.top_k
aggregators.uplink: chain
analysis.clients: confusion contribution
analysis.curves: run_figure
analysis.groups: labels
analysis.listing: notes
analysis.panels: axes
analysis.publish.page.tables: headline
analysis.report: target
analysis.runs: tuning
callbacks.logger_links: round_numbers
callbacks.loggers: pictures
callbacks.monitors: flow_monitor latent_space probe
callbacks.stopping: early_stopping stop_at
callbacks.wandb_link: wandb_files
commands.contribution: shares worlds
commands.describing: plain_types
commands.fork: replay
commands.pack: runs.packing
commands.report: report_cross
commands.request: run_folder
commands.sweeps.plan: tuning
commands.sweeps.queue: outcome
data.datasets.csv_files: column_scale
data.datasets.from_dataset: from_data_module
data.datasets.generated: digits synthetic
data.datasets.table: table_files
data.datasets.vision: cinic10
data.federated: rows spec
data.partitions.base: counts
data.partitions.dirichlet: dirichlet_balanced dirichlet_extended dirichlet_proportions
data.partitions.shares: iid natural owners pathological quantity ranked sole_owner
federation.client.callbacks: lr_decay
federation.client.devices: allocator placement precision
federation.client.entries: resident
federation.client.setup: fits
federation.engines.auto: vectorized
federation.engines.ray_cluster: ray_worker
federation.engines.wire: worker
federation.schedules.speeds: availability
federation.server.evaluation: adaptation
flower.server: engine strategy
metrics.fisher.estimates: columns full measuring per_sample
metrics.fisher.forms: empirical predictive
metrics.scores: continual
models.abilities: declarations protocols
models.autoencoders: strides
models.backbones.base: cnn lenet mlp small
models.backbones.resnets: resnet18 resnet20
models.classifier: pretrained
models.flows: gaussians replay
runs.checkpoint: kept
runs.fork: reuse
runs.rounds: rehearsal
runs.scoring: predictions
runs.settings: options
studies.inversion.attack: figure gan
studies.inversion.target: knowledge
"""
_GROUND = "arguments errors files lightning_internals messages random score_names state"


def _rows() -> Iterator[tuple[str, str]]:
    for name in _GROUND.split():
        yield f"flsuite.{name}", f"flsuite.common.{name}"
    for line in _MERGED.split("\n")[1:-1]:
        new, olds = line.split(": ")
        folder = new.rpartition(".")[0]
        for old in olds.split():
            yield f"flsuite.{old if '.' in old else f'{folder}.{old}'}", f"flsuite.{new}"


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
