"""Who trains when."""

from flsuite.schedules.asynchronous import Asynchronous
from flsuite.schedules.base import Schedule
from flsuite.schedules.clock import Clock
from flsuite.schedules.synchronous import Synchronous

__all__ = ["Clock", "Schedule", "Synchronous"]
