"""Engines: where clients train.

Names are imported on first use, because the command may start the fork server of
:mod:`flsuite.engines.forkserver` before any heavy import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flsuite.engines.auto import Auto
    from flsuite.engines.base import Engine, InProcess
    from flsuite.engines.processes import Processes
    from flsuite.engines.ray import Ray
    from flsuite.engines.vectorized import Vectorized

__all__ = ["Auto", "Engine", "InProcess", "Processes", "Ray", "Vectorized"]

_HOME = {
    "Auto": "flsuite.engines.auto",
    "Engine": "flsuite.engines.base",
    "InProcess": "flsuite.engines.base",
    "Processes": "flsuite.engines.processes",
    "Ray": "flsuite.engines.ray",
    "Vectorized": "flsuite.engines.vectorized",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
