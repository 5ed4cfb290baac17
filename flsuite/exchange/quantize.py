"""Quantization: every number of an update with a few bits."""

from dataclasses import dataclass
from typing import Any

from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.arguments import Bits, Settings
from flsuite.errors import FlsuiteError
from flsuite.exchange.base import WITHHELD, finite_payload
from flsuite.exchange.tree_quantizer import TreeQuantizer

__all__ = ["Quantize"]


@dataclass(frozen=True)
class Quantize(Transform, Settings):
    """Every float of the change and of the statistics with ``bits`` bits.

    Each tensor x is rounded to multiples of ``s = max|x| / (2^(bits-1) - 1)``, with an error of at
    most ``s / 2``. Zeros stay zeros. A tensor without negative values, such as a Fisher diagonal,
    needs no sign and takes ``bits - 1``. With 16 bits, a change and a Fisher diagonal are together
    smaller than the model in float32. Integers, such as counters, travel as they are, and so do
    buffers.

    The log has ``quantized_to_zero/change``, and the same for every statistic: the share of its
    numbers other than zero that became zero, which are those below ``s / 2``.

    K-FAC factors and Gram matrices are refused. Rounded number by number they would no longer be
    positive semi-definite. :class:`~flsuite.exchange.LowRank` keeps them so.

    Args:
        bits: Bits per number, from 2 to 16.
    """

    bits: Bits = 16

    needs = frozenset({"clients", "rounded matrices"})
    # A second one would find codes in place of numbers.
    withholds = {**WITHHELD, "rounded matrices": "has rounded all numbers"}

    def encode(self, payload: Payload, fit: FitView) -> Payload:
        payload, quantizer = finite_payload(payload), TreeQuantizer(self.bits)
        change = quantizer.encode(payload.change, "change")
        statistics = {k: quantizer.encode(value, k) for k, value in payload.statistics.items()}
        fit.metrics.update(quantizer.metrics())
        return Payload(change, statistics)

    def decode(self, payload: Payload, template: Payload, received: dict[str, Any]) -> Payload:
        decode = TreeQuantizer(self.bits).decode
        change = decode(payload.change, template.change, "change")
        return Payload(change, decode(payload.statistics, template.statistics, "statistics"))

    def template(self, template: Payload) -> Payload:
        if not template.change and not template.statistics:
            raise FlsuiteError("Quantize: clients send nothing; leave it out")
        quantizer = TreeQuantizer(self.bits)
        change = quantizer.template(template.change)
        return Payload(change, quantizer.template(template.statistics))
