"""Progress, logging and stopping of a federation."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.callbacks.base import FederationCallback
    from flsuite.callbacks.dissimilarity import GradientDissimilarity
    from flsuite.callbacks.dp_sgd import DPSGD
    from flsuite.callbacks.loggers import RoundLogger
    from flsuite.callbacks.monitors import FlowMonitor, ForestProbe, LatentSpace
    from flsuite.callbacks.progress import RoundProgress
    from flsuite.callbacks.stopping import RoundEarlyStopping, StopAt
    from flsuite.callbacks.task_matrix import TaskMatrix

__all__ = [
    "DPSGD",
    "FederationCallback",
    "FlowMonitor",
    "ForestProbe",
    "GradientDissimilarity",
    "LatentSpace",
    "RoundEarlyStopping",
    "RoundLogger",
    "RoundProgress",
    "StopAt",
    "TaskMatrix",
]

__getattr__, __dir__ = on_first_use(__name__)
