"""Where clients train."""

from flsuite.engines.base import Engine
from flsuite.engines.in_process import InProcess
from flsuite.engines.processes import Processes

__all__ = ["Engine", "InProcess", "Processes"]
