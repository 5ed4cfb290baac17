"""The server's step: any optimizer of torch, and the adaptive ones of federated learning."""

from flsuite.aggregators.server_optimizers.adaptive import (
    AdaptiveAdagrad,
    AdaptiveAdam,
    AdaptiveYogi,
)

__all__ = ["AdaptiveAdagrad", "AdaptiveAdam", "AdaptiveYogi"]
