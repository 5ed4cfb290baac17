"""Scores, forgetting, gradient dissimilarity and Fisher information."""

from flsuite.metrics.continual import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from flsuite.metrics.dissimilarity import (
    RunningDissimilarity,
    decompose,
    gradient_dissimilarity,
    relative_dissimilarity,
)
from flsuite.metrics.scores import (
    HIGHER_IS_BETTER,
    class_accuracy,
    lower_is_better,
    require_score,
    score_name,
    scores,
    summary,
)
from flsuite.models.protocols import FusedModel

__all__ = [
    "HIGHER_IS_BETTER",
    "FusedModel",
    "RunningDissimilarity",
    "average_accuracy",
    "backward_transfer",
    "class_accuracy",
    "decompose",
    "forgetting",
    "forward_transfer",
    "gradient_dissimilarity",
    "lower_is_better",
    "relative_dissimilarity",
    "require_score",
    "score_name",
    "scores",
    "summary",
]
