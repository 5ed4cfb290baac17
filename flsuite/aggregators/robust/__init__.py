"""Robust rules: the global model under clients that send anything, one rule per file."""

from flsuite.aggregators.robust.base import ParameterRule, RobustAggregator
from flsuite.aggregators.robust.bucketing import Bucketing
from flsuite.aggregators.robust.centered_clipping import CenteredClipping
from flsuite.aggregators.robust.cohort import Cohort
from flsuite.aggregators.robust.fltrust import FLTrust
from flsuite.aggregators.robust.geometric_median import GeometricMedian
from flsuite.aggregators.robust.krum import Krum, MultiKrum
from flsuite.aggregators.robust.median import CoordinateMedian
from flsuite.aggregators.robust.norm_clipping import NormClipping
from flsuite.aggregators.robust.trimmed_mean import TrimmedMean

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
    "RobustAggregator",
    "TrimmedMean",
]
