"""Who trains when."""

from flsuite.schedules.base import Schedule
from flsuite.schedules.synchronous import Synchronous

__all__ = ["Schedule", "Synchronous"]
