"""Scores, forgetting, gradient dissimilarity and Fisher information."""

from flsuite.metrics.dissimilarity import RunningDissimilarity as RunningDissimilarity
from flsuite.metrics.scores import (
    average_accuracy as average_accuracy,
    backward_transfer as backward_transfer,
    class_accuracy as class_accuracy,
    forgetting as forgetting,
    forward_transfer as forward_transfer,
    scores as scores,
    summary as summary,
)
