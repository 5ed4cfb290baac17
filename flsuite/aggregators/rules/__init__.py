"""Rules that combine the updates of a round into one model, one per file."""

from flsuite.aggregators.rules.base import CohortRule, LinearRule, Rule, Weighting
from flsuite.aggregators.rules.mean import Mean, MixedMean, Mixing, Normalize

__all__ = [
    "CohortRule",
    "LinearRule",
    "Mean",
    "MixedMean",
    "Mixing",
    "Normalize",
    "Rule",
    "Weighting",
]
