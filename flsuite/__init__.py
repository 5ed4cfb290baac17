"""flsuite: federated-learning experiments with PyTorch Lightning.

Names are imported on first use, so ``import flsuite`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flsuite.errors import FederationError, FlsuiteError
    from flsuite.trainer import FederatedTrainer

__version__ = "0.2.0"
__all__ = ["FederatedTrainer", "FederationError", "FlsuiteError", "__version__"]

_HOME = {
    "FederatedTrainer": "flsuite.trainer",
    "FederationError": "flsuite.errors",
    "FlsuiteError": "flsuite.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
