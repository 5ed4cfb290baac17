"""Progress, logging and stopping of a federation."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.callbacks.base import FederationCallback as FederationCallback
    from flsuite.callbacks.dissimilarity import GradientDissimilarity as GradientDissimilarity
    from flsuite.callbacks.dp_sgd import DPSGD as DPSGD
    from flsuite.callbacks.loggers import RoundLogger as RoundLogger
    from flsuite.callbacks.monitors import (
        FlowMonitor as FlowMonitor,
        ForestProbe as ForestProbe,
        LatentSpace as LatentSpace,
    )
    from flsuite.callbacks.progress import RoundProgress as RoundProgress
    from flsuite.callbacks.stopping import (
        RoundEarlyStopping as RoundEarlyStopping,
        StopAt as StopAt,
    )
    from flsuite.callbacks.task_matrix import TaskMatrix as TaskMatrix


__getattr__, __dir__ = on_first_use(__name__)
