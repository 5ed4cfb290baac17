"""A federation: who trains when, where, one fit, and the server."""

from typing import TYPE_CHECKING

from flsuite.common.exports import on_first_use

if TYPE_CHECKING:
    from flsuite.federation.client.callbacks import (
        CosineDecay as CosineDecay,
        ExponentialDecay as ExponentialDecay,
        LRDecay as LRDecay,
        StepDecay as StepDecay,
    )
    from flsuite.federation.client.profiler import ClientProfiler as ClientProfiler
    from flsuite.federation.engines.auto import Auto as Auto, Vectorized as Vectorized
    from flsuite.federation.engines.base import Engine as Engine, InProcess as InProcess
    from flsuite.federation.engines.processes import Processes as Processes
    from flsuite.federation.engines.ray import Ray as Ray
    from flsuite.federation.schedules.asynchronous import Asynchronous as Asynchronous
    from flsuite.federation.schedules.base import (
        Always as Always,
        Availability as Availability,
        Clock as Clock,
        Fit as Fit,
        Measured as Measured,
        Schedule as Schedule,
        Speeds as Speeds,
    )
    from flsuite.federation.schedules.faults import Faults as Faults
    from flsuite.federation.schedules.selection import (
        Oort as Oort,
        PowerOfChoice as PowerOfChoice,
        Selection as Selection,
    )
    from flsuite.federation.schedules.speeds import (
        Bernoulli as Bernoulli,
        LogNormal as LogNormal,
        OnOff as OnOff,
        PerSample as PerSample,
        Stragglers as Stragglers,
    )
    from flsuite.federation.schedules.synchronous import Synchronous as Synchronous
    from flsuite.federation.schedules.traces import Trace as Trace


__getattr__, __dir__ = on_first_use(__name__)
