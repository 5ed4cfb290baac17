"""The clipping of clients' changes to a largest norm."""

import math
from dataclasses import dataclass
from typing import Any

from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.arguments import Radius, Settings
from flsuite.state import State


@dataclass(frozen=True)
class ClipUpdates(Transform, Settings):
    """A change ``D`` becomes ``D min(1, norm / ||D||)``, over all parameters together.

    The client clips, and the server clips again: an attacker need not. Clients log ``update_norm``,
    the norm before clipping.

    Args:
        norm: Largest L2 norm of a change. It may be infinite.
    """

    norm: Radius = 1.0

    needs = frozenset({"dense changes"})
    withholds = {"plain updates": "clips every update that arrives"}

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        change, norm = clipped(payload.change, self.norm)
        fit.metrics["update_norm"] = norm
        return payload if change is payload.change else payload._replace(change=change)

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        change, _ = clipped(payload.change, self.norm)
        return payload if change is payload.change else payload._replace(change=change)


def clipped(change: State, norm: float) -> tuple[State, float]:
    """Return a change scaled down to a largest norm, and its norm before.

    A change within the norm is returned itself. Rounding to the dtype of the model may leave a
    clipped change above the norm by parts in ten million.
    """
    squares = [float(value.square().sum()) for value in change.values()]
    before = math.sqrt(math.fsum(squares))
    if before <= norm or math.isnan(before):  # a NaN is refused by name on arrival
        return change, before
    return {name: value * (norm / before) for name, value in change.items()}, before
