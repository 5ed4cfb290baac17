"""Quantization: every number of an update with a few bits."""

from typing import Any

from flsuite.aggregators.base import Aggregator
from flsuite.errors import FlsuiteError
from flsuite.exchange.base import Compression, require_finite, require_keys
from flsuite.exchange.tree_quantizer import TreeQuantizer, require_bits
from flsuite.state import State

__all__ = ["Quantize"]


class Quantize(Compression):
    """Every float of the state and of the extras with ``bits`` bits.

    Each tensor x is rounded to multiples of ``s = max|x| / (2^(bits-1) - 1)``, with an error of at
    most ``s / 2``. Zeros stay zeros. A tensor without negative values, such as a Fisher diagonal,
    needs no sign and takes ``bits - 1``. With 16 bits, a state and its Fisher diagonal are together
    smaller than the state in float32. Integers, such as counters, travel as they are.

    The log has ``quantized_to_zero/state``, and the same for every entry of the extras: the share
    of its numbers other than zero that became zero, which are those below ``s / 2``.

    K-FAC factors and Gram matrices are refused. Rounded number by number they would no longer be
    positive semi-definite. :class:`~flsuite.exchange.LowRank` keeps them so.

    Args:
        bits: Bits per number, from 2 to 16.
    """

    def __init__(self, bits: int = 16) -> None:
        self.bits = bits
        require_bits("Quantize", bits=bits)

    def encode(
        self, state: State, extras: dict[str, Any], base: State, memory: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        require_finite(state=state, extras=extras)
        quantizer = TreeQuantizer(self.bits)
        message = {
            "state": quantizer.encode(state, "state"),
            "extras": {name: quantizer.encode(value, name) for name, value in extras.items()},
        }
        return message, quantizer.metrics()

    def decode(self, message: dict[str, Any], base: State) -> tuple[State, dict[str, Any]]:
        require_keys(message, ("state", "extras"), "message")
        quantizer = TreeQuantizer(self.bits)
        state = quantizer.decode(message["state"], self.state_template, "state")
        return state, quantizer.decode(message["extras"], self.extras_template, "extras")

    def size(self) -> int:
        quantizer = TreeQuantizer(self.bits)
        return quantizer.size(self.state_template) + quantizer.size(self.extras_template)

    def configure(self, aggregator: Aggregator, state: State, extras: dict[str, Any]) -> None:
        super().configure(aggregator, state, extras)
        if names := aggregator.psd_extras:
            raise FlsuiteError(
                f"Quantize: the matrices that {type(aggregator).__name__} sends "
                f"({', '.join(names)}) would not stay positive semi-definite; set "
                "trainer.compression to LowRank"
            )
