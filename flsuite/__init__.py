"""flsuite: federated-learning experiments with PyTorch Lightning.

Names are imported on first use, so ``import flsuite`` costs nothing.
"""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use
from flsuite.common.moved import accept_old_names

if TYPE_CHECKING:
    from flsuite.common.errors import FederationError, FlsuiteError
    from flsuite.trainer import FederatedTrainer

__version__ = "0.2.0"
__all__ = ["FederatedTrainer", "FederationError", "FlsuiteError", "__version__"]

__getattr__, __dir__ = on_first_use(__name__)
accept_old_names()
