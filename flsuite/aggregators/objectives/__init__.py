"""Terms that clients minimize in addition to their loss, one per file."""

from flsuite.aggregators.objectives.base import Objective
from flsuite.aggregators.objectives.control_variates import Control, ControlVariates
from flsuite.aggregators.objectives.proximal import Proximal

__all__ = ["Control", "ControlVariates", "Objective", "Proximal"]
