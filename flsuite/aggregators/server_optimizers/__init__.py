"""The server's step with any torch optimizer, and adaptive optimizers of federated learning."""

from flsuite.aggregators.server_optimizers.adaptive import (
    AdaptiveAdagrad,
    AdaptiveAdam,
    AdaptiveYogi,
)

__all__ = ["AdaptiveAdagrad", "AdaptiveAdam", "AdaptiveYogi"]
