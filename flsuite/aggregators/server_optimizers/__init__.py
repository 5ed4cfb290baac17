"""The server's step: any optimizer of torch, and the adaptive ones of federated learning."""

from flsuite.aggregators.server_optimizers.adaptive import (
    AdaptiveAdagrad,
    AdaptiveAdam,
    AdaptiveYogi,
)
from flsuite.aggregators.server_optimizers.step import require_step, stepped

__all__ = ["AdaptiveAdagrad", "AdaptiveAdam", "AdaptiveYogi", "require_step", "stepped"]
