"""Byzantine-robust rules, which tolerate clients that send anything, one per file."""

from flsuite.aggregators.rules.robust.base import ParameterRule
from flsuite.aggregators.rules.robust.bucketing import Bucketing
from flsuite.aggregators.rules.robust.centered_clipping import CenteredClipping
from flsuite.aggregators.rules.robust.cohort import Cohort
from flsuite.aggregators.rules.robust.fltrust import FLTrust
from flsuite.aggregators.rules.robust.geometric_median import GeometricMedian
from flsuite.aggregators.rules.robust.krum import Krum, MultiKrum
from flsuite.aggregators.rules.robust.median import CoordinateMedian, TrimmedMean
from flsuite.aggregators.rules.robust.norm_clipping import NormClipping

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
