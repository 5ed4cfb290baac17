"""What is measured."""

from flsuite.metrics.scores import HIGHER_IS_BETTER, class_accuracy, scores, summary

__all__ = ["HIGHER_IS_BETTER", "class_accuracy", "scores", "summary"]
