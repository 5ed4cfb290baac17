"""Scores, forgetting, gradient dissimilarity and Fisher information."""

from flsuite.metrics.dissimilarity import RunningDissimilarity
from flsuite.metrics.scores import (
    average_accuracy,
    backward_transfer,
    class_accuracy,
    forgetting,
    forward_transfer,
    scores,
    summary,
)

__all__ = [
    "RunningDissimilarity",
    "average_accuracy",
    "backward_transfer",
    "class_accuracy",
    "forgetting",
    "forward_transfer",
    "scores",
    "summary",
]
