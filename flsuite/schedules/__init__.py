"""Who trains when, and how long it takes on the virtual clock."""

from flsuite.schedules.asynchronous import Asynchronous
from flsuite.schedules.availability import Bernoulli, OnOff
from flsuite.schedules.base import (
    Always,
    Availability,
    Clock,
    Fit,
    Measured,
    Schedule,
    Speeds,
    Work,
)
from flsuite.schedules.faults import Faults
from flsuite.schedules.selection import Oort, PowerOfChoice, Selection
from flsuite.schedules.speeds import LogNormal, PerSample, Stragglers
from flsuite.schedules.synchronous import Synchronous
from flsuite.schedules.traces import Trace

__all__ = [
    "Always",
    "Asynchronous",
    "Availability",
    "Bernoulli",
    "Clock",
    "Faults",
    "Fit",
    "LogNormal",
    "Measured",
    "OnOff",
    "Oort",
    "PerSample",
    "PowerOfChoice",
    "Schedule",
    "Selection",
    "Speeds",
    "Stragglers",
    "Synchronous",
    "Trace",
    "Work",
]
