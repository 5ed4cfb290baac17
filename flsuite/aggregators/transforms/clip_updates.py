"""Clipping of clients' changes to a maximum norm."""

import math
from dataclasses import dataclass
from typing import Any

from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.common.arguments import Radius, Settings
from flsuite.common.state import State


@dataclass(frozen=True)
class ClipUpdates(Transform, Settings):
    """A change ``D`` becomes ``D min(1, norm / ||D||)``, over all parameters together.

    The client clips, and the server clips again, because an attacker may not clip. Clients log
    ``update_norm``, the norm before clipping.

    Args:
        norm: Maximum L2 norm of a change. It may be infinite.
    """

    norm: Radius = 1.0

    needs = frozenset({"dense changes"})
    withholds = {
        "plain updates": "clips every update that arrives",
        "exact changes": "shortens them",
    }

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        payload, fit.metrics["update_norm"] = clipped(payload, self.norm)
        return payload

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        return clipped(payload, self.norm)[0]


def clipped(payload: Payload, norm: float) -> tuple[Payload, float]:
    """Return a payload with its change clipped to a maximum norm, and the norm before clipping.

    A change within the norm returns the same payload object. After rounding to the dtype of the
    model, a clipped change may exceed the norm by a relative 1e-7.
    """
    change: State = payload.change
    squares = [float(value.square().sum()) for value in change.values()]
    before = math.sqrt(math.fsum(squares))
    if before <= norm or math.isnan(before):  # NaN is refused by name on arrival
        return payload, before
    change = {name: value * (norm / before) for name, value in change.items()}
    return payload._replace(change=change), before
