"""Terms that clients minimize in addition to their loss, one per file."""

from flsuite.aggregators.objectives.base import Objective, Proximal
from flsuite.aggregators.objectives.control_variates import Control, ControlVariates
from flsuite.aggregators.objectives.feature_term import FeatureTerm
from flsuite.aggregators.objectives.second_steps import SecondSteps

__all__ = ["Control", "ControlVariates", "FeatureTerm", "Objective", "Proximal", "SecondSteps"]
