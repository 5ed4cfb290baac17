"""A federation: who trains when, where, one fit, and the server."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.federation.client.callbacks import (
        CosineDecay,
        ExponentialDecay,
        LRDecay,
        StepDecay,
    )
    from flsuite.federation.client.profiler import ClientProfiler
    from flsuite.federation.engines.auto import Auto, Vectorized
    from flsuite.federation.engines.base import Engine, InProcess
    from flsuite.federation.engines.processes import Processes
    from flsuite.federation.engines.ray import Ray
    from flsuite.federation.schedules.asynchronous import Asynchronous
    from flsuite.federation.schedules.base import (
        Always,
        Availability,
        Clock,
        Fit,
        Measured,
        Schedule,
        Speeds,
    )
    from flsuite.federation.schedules.base import Work as Work  # of 0.2, not listed
    from flsuite.federation.schedules.faults import Faults
    from flsuite.federation.schedules.selection import Oort, PowerOfChoice, Selection
    from flsuite.federation.schedules.speeds import (
        Bernoulli,
        LogNormal,
        OnOff,
        PerSample,
        Stragglers,
    )
    from flsuite.federation.schedules.synchronous import Synchronous
    from flsuite.federation.schedules.traces import Trace

__all__ = [
    "Always",
    "Asynchronous",
    "Auto",
    "Availability",
    "Bernoulli",
    "ClientProfiler",
    "Clock",
    "CosineDecay",
    "Engine",
    "ExponentialDecay",
    "Faults",
    "Fit",
    "InProcess",
    "LRDecay",
    "LogNormal",
    "Measured",
    "OnOff",
    "Oort",
    "PerSample",
    "PowerOfChoice",
    "Processes",
    "Ray",
    "Schedule",
    "Selection",
    "Speeds",
    "StepDecay",
    "Stragglers",
    "Synchronous",
    "Trace",
    "Vectorized",
]

__getattr__, __dir__ = on_first_use(__name__)
