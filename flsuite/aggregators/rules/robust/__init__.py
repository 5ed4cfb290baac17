"""Byzantine-robust rules, which tolerate clients that send anything, one per file."""

from flsuite.aggregators.rules.robust.base import Cohort, ParameterRule
from flsuite.aggregators.rules.robust.centers import (
    CenteredClipping,
    CoordinateMedian,
    GeometricMedian,
    NormClipping,
    TrimmedMean,
)
from flsuite.aggregators.rules.robust.chosen import Bucketing, FLTrust, Krum, MultiKrum

__all__ = [
    "Bucketing",
    "CenteredClipping",
    "Cohort",
    "CoordinateMedian",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "MultiKrum",
    "NormClipping",
    "ParameterRule",
    "TrimmedMean",
]
