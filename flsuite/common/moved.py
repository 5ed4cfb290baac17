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


def moved(name: str) -> str:
    """Return today's name of a module, or of something in it. Other names stay as they are."""
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
        if old in _FILES or old in _PACKAGES:  # one line for a package and the modules in it
            log.warning("%s is now %s: please change the name", old, moved(old))
        sys.modules[old] = import_module(moved(old))


def accept_old_names() -> None:
    """Let imports find the modules of 0.2, with a warning that names the new one."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
