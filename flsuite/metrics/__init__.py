"""Scores, forgetting, gradient dissimilarity and Fisher information."""

from flsuite.metrics.continual import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from flsuite.metrics.dissimilarity import RunningDissimilarity
from flsuite.metrics.scores import class_accuracy, scores, summary
from flsuite.score_names import (
    HIGHER_IS_BETTER,
    lower_is_better,
    main_scores,
    require_score,
    score_name,
    score_of,
)

__all__ = [
    "HIGHER_IS_BETTER",
    "RunningDissimilarity",
    "average_accuracy",
    "backward_transfer",
    "class_accuracy",
    "forgetting",
    "forward_transfer",
    "lower_is_better",
    "main_scores",
    "require_score",
    "score_name",
    "score_of",
    "scores",
    "summary",
]
