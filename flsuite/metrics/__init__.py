"""What is measured."""

from flsuite.metrics.dissimilarity import (
    FusedModel,
    RunningDissimilarity,
    decompose,
    gradient_dissimilarity,
    relative_dissimilarity,
)
from flsuite.metrics.scores import HIGHER_IS_BETTER, class_accuracy, scores, summary

__all__ = [
    "HIGHER_IS_BETTER",
    "FusedModel",
    "RunningDissimilarity",
    "class_accuracy",
    "decompose",
    "gradient_dissimilarity",
    "relative_dissimilarity",
    "scores",
    "summary",
]
