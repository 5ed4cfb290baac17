"""Top-k sparsification with error feedback.

Stich, Cordonnier and Jaggi 2018, Sparsified SGD with Memory, arXiv:1809.07599, algorithm 1.
Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
arXiv:1901.09847, algorithm 2.
"""

from dataclasses import dataclass
from typing import Any

import torch

from flsuite.aggregators.transforms.base import (
    ENCODES,
    FitView,
    Payload,
    Transform,
    empty,
    refuse,
    require_finite,
)
from flsuite.common.arguments import Fraction, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import State, mismatch, unflatten


@dataclass(frozen=True)
class TopK(Transform, Settings):
    """Sends the largest entries of a client's change. The rest is added to its next change.

    Take it to send one percent of the change, if clients come back to send the rest.

    The client adds the residual of its earlier fits to its change. It sends the k entries of
    largest magnitude over all parameters, and keeps the rest as the new residual. Both papers apply
    this to the step of SGD. The first fit of a client has no residual.

    An entry is sent as its int32 index and its float32 value. That is 8 bytes per entry, so fewer
    than half of the entries must be sent to save bytes. With ``fraction`` 1, the model itself is
    sent, and arrives bit for bit.

    Statistics are sent unchanged. A residual takes as much of the client's memory as the
    parameters. Logged is ``change_sent``, the fraction of the squared change that is sent.

    Args:
        fraction: Entries to send, as a fraction of all parameters. At least one is sent.
    """

    fraction: Fraction = 0.01

    needs = frozenset({"clients", "dense changes", "each update"})
    withholds = ENCODES

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        if self.fraction == 1.0:
            fit.metrics["change_sent"] = 1.0
            return payload
        require_finite(payload._asdict())
        total = torch.cat([value.reshape(-1) for value in payload.change.values()])
        if "residual" in fit.memory:
            total += fit.memory["residual"]

        # Sort, so the message does not depend on how topk splits its work.
        largest = torch.topk(total.abs(), self._count(len(total)), sorted=False)
        chosen = largest.indices.sort().values
        values = total[chosen].float()
        # The residual includes the rounding error of float32.
        residual = total.index_add(0, chosen, values.double(), alpha=-1)
        fit.memory["residual"] = residual.float()

        whole, left = float(total.square().sum()), float(residual.square().sum())
        fit.metrics["change_sent"] = 1.0 - left / whole if whole else 1.0
        return payload._replace(change={"indexes": chosen.to(torch.int32), "values": values})

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        if self.fraction == 1.0:
            return payload
        size = _size(template.change)
        code = self._checked(payload, template, size)
        vector = code["values"].new_zeros(size)
        vector[code["indexes"].long()] = code["values"]
        return payload._replace(change=unflatten(vector, template.change, template.change))

    def template(self, template: Payload) -> Payload:
        size = _size(template.change)
        if not size:
            raise FlsuiteError("TopK: clients send no parameters; leave it out")
        if self.fraction == 1.0:
            return template
        shape = (self._count(size),)
        code = {"indexes": empty(shape, torch.int32), "values": empty(shape, torch.float32)}
        return template._replace(change=code)

    def _count(self, size: int) -> int:
        return max(1, round(self.fraction * size))

    def _checked(self, payload: Payload, template: Payload, size: int) -> State:
        """Return the code of a message, which may contain anything.

        Raises:
            ValueError: If it is not a code of such a change.
        """
        refuse(mismatch(payload.change, self.template(template).change, "change"))
        refuse(mismatch(payload.statistics, template.statistics, "statistics"))
        require_finite(payload._asdict())
        indexes = payload.change["indexes"]
        first, last = int(indexes[0]), int(indexes[-1])
        if first < 0 or last >= size or not bool((indexes[1:] > indexes[:-1]).all()):
            raise ValueError(
                f"indexes must ascend from 0 to at most {size - 1}, without repeats; they start "
                f"with {first} and end with {last}"
            )
        return payload.change


def _size(change: State) -> int:
    return sum(value.numel() for value in change.values())
