"""How the updates of a round become one model, one rule per file."""

from flsuite.aggregators.rules.base import CohortRule, LinearRule, Rule
from flsuite.aggregators.rules.mean import Mean, Normalize, Weighting
from flsuite.aggregators.rules.mixing import MixedMean, Mixing
from flsuite.aggregators.rules.robust import (
    Bucketing,
    CenteredClipping,
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    ParameterRule,
    TrimmedMean,
)

__all__ = [
    "Bucketing",
    "CenteredClipping",
    "CohortRule",
    "CoordinateMedian",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "LinearRule",
    "Mean",
    "MixedMean",
    "Mixing",
    "MultiKrum",
    "NormClipping",
    "Normalize",
    "ParameterRule",
    "Rule",
    "TrimmedMean",
    "Weighting",
]
