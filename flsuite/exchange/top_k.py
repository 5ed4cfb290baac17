"""Top-k sparsification with error feedback.

Stich, Cordonnier and Jaggi 2018, Sparsified SGD with Memory, arXiv:1809.07599, algorithm 1.
Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
arXiv:1901.09847, algorithm 2.
"""

from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.base import Aggregator
from flsuite.errors import FlsuiteError, require_fraction
from flsuite.exchange.base import (
    Compression,
    empty,
    require_finite,
    require_keys,
    require_match,
)
from flsuite.state import State, nbytes

__all__ = ["TopK"]


class TopK(Compression):
    """The largest entries of a client's change. What is left out is added to its next change.

    The client adds the residual of its earlier fits to the change of its model. It sends the k
    entries of largest magnitude, over all parameters together, and keeps the others as the new
    residual. Both papers do so with the step of SGD. The first fit of a client has no residual.

    An entry travels as its int32 index and the value that the parameter gets, in its own dtype.
    That is 8 bytes per entry, so that less than half of the entries must be sent to save bytes.
    The server puts the values into the model that the client started from. With ``fraction`` 1 it
    has the client's model, bit for bit.

    Buffers and extras travel as they are. A residual takes as much of the client's memory as the
    parameters. The log has ``change_sent``, the share of the squared change that is sent.

    Args:
        fraction: Entries to send, as a share of all parameters. At least one is sent.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        self.fraction = fraction
        require_fraction("TopK", fraction=fraction)

    def configure(self, aggregator: Aggregator, state: State, extras: dict[str, Any]) -> None:
        super().configure(aggregator, state, extras)
        self._names = [
            name
            for name in aggregator.layout.parameters
            if name in state and state[name].is_floating_point()
        ]
        if not self._names:
            raise FlsuiteError(
                f"TopK: clients of {type(aggregator).__name__} send no parameters; leave out "
                "trainer.compression"
            )
        dtypes = {state[name].dtype for name in self._names}
        if len(dtypes) > 1:
            raise FlsuiteError(
                f"TopK: the parameters have several dtypes ({', '.join(map(str, dtypes))}); use "
                "Quantize"
            )
        self._dtype = dtypes.pop()
        self._size = sum(state[name].numel() for name in self._names)
        self._count = max(1, round(self.fraction * self._size))

    def encode(
        self, state: State, extras: dict[str, Any], base: State, memory: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        require_finite(state=state, extras=extras)
        target, start = self._vector(state), self._vector(base)
        if "residual" in memory:
            target += memory["residual"]
        change = target - start

        # In ascending order, so that the message does not depend on how topk breaks its work up.
        chosen = torch.topk(change.abs(), self._count, sorted=False).indices.sort().values
        residual = change.clone()
        residual[chosen] = 0.0
        memory["residual"] = residual

        message = {
            "indexes": chosen.to(torch.int32),
            "values": target[chosen],
            "others": {name: state[name] for name in state if name not in self._names},
            "extras": extras,
        }
        total = float(change.double().square().sum())
        left = float(residual.double().square().sum())
        return message, {"change_sent": 1.0 - left / total if total else 1.0}

    def decode(self, message: dict[str, Any], base: State) -> tuple[State, dict[str, Any]]:
        self._check(message)
        vector = self._vector(base)
        vector[message["indexes"].long()] = message["values"]

        sizes = [base[name].numel() for name in self._names]
        parts = vector.split(sizes)
        parameters = {
            name: part.clone().reshape(base[name].shape)
            for name, part in zip(self._names, parts, strict=True)
        }
        # In the order of the model.
        whole = {**parameters, **message["others"]}
        return {name: whole[name] for name in self.state_template}, message["extras"]

    def size(self) -> int:
        entry = 4 + self._dtype.itemsize
        return self._count * entry + nbytes(self._others()) + nbytes(self.extras_template)

    def _others(self) -> State:
        """Return the templates of the entries that travel as they are."""
        return {k: value for k, value in self.state_template.items() if k not in self._names}

    def _vector(self, state: State) -> Tensor:
        """Return all parameters as one new vector."""
        return torch.cat([state[name].reshape(-1) for name in self._names])

    def _check(self, message: dict[str, Any]) -> None:
        require_keys(message, ("indexes", "values", "others", "extras"), "message")
        require_match(message["indexes"], empty((self._count,), torch.int32), "indexes")
        require_match(message["values"], empty((self._count,), self._dtype), "values")
        require_match(message["others"], self._others(), "state")
        require_match(message["extras"], self.extras_template, "extras")
        require_finite(values=message["values"], state=message["others"], extras=message["extras"])

        indexes = message["indexes"]
        first, last = int(indexes[0]), int(indexes[-1])
        if first < 0 or last >= self._size or not bool((indexes[1:] > indexes[:-1]).all()):
            raise ValueError(
                f"indexes must ascend from 0 to at most {self._size - 1}, without repeats; they "
                f"start with {first} and end with {last}"
            )
