"""Quantization of updates to a few bits per number."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsuite.aggregators.exchange.base import (
    WITHHELD,
    TreeCode,
    empty,
    finite_payload,
    require_finite,
    require_match,
)
from flsuite.aggregators.exchange.codes import decode_tensor, empty_codes, encode_tensor, quantize
from flsuite.aggregators.transforms.base import FitView, Payload, Transform
from flsuite.common.arguments import Bits, Settings
from flsuite.common.errors import FlsuiteError
from flsuite.common.state import nbytes


@dataclass(frozen=True)
class Quantize(Transform, Settings):
    """Quantizes every float of the change and of the statistics to ``bits`` bits.

    Each tensor x is rounded to multiples of ``s = max|x| / (2^(bits-1) - 1)``, with an error of at
    most ``s / 2``. Zeros stay zeros. A tensor without negative values, such as a Fisher diagonal,
    needs no sign and takes ``bits - 1``. With 16 bits, a change and a Fisher diagonal together are
    smaller than the model in float32. Integers, such as counters, and buffers are sent unchanged.

    Logged is ``quantized_to_zero/change``, and the same for every statistic: the fraction of its
    nonzero numbers that became zero because they are below ``s / 2``.

    K-FAC factors and Gram matrices are refused, because rounding each number would make them
    indefinite. :class:`~flsuite.aggregators.LowRank` keeps them positive semidefinite.

    Args:
        bits: Bits per number, from 2 to 16.
    """

    bits: Bits = 16

    needs = frozenset({"clients", "rounded matrices"})
    # A second codec would receive codes instead of numbers.
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


class TreeQuantizer(TreeCode):
    """Packs the float tensors of nested dicts, and counts the numbers that become zero.

    Integer tensors and numbers stay unchanged, and so do float tensors that codes would not make
    smaller.

    Args:
        bits: Bits per number.

    Attributes:
        counts: The count of nonzero numbers, per part.
        lost: The count of those whose code is zero, per part.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def _encode(self, tree: Any, part: str) -> Any:
        if not self._is_packed(tree):
            return tree

        largest = tree.abs().max()
        codes = quantize(tree, largest, self.bits)
        count = int(torch.count_nonzero(tree))
        self.counts[part] += count
        self.lost[part] += count - int(torch.count_nonzero(codes))
        return encode_tensor(codes, largest, self.bits)

    def _decode(self, packed: Any, template: Any, name: str) -> Any:
        if self._is_packed(template):
            return decode_tensor(packed, template, self.bits, name)

        require_match(packed, template, name)
        require_finite(**{name: packed})
        return packed

    def _template(self, template: Any) -> Any:
        return self._packed(template) if self._is_packed(template) else template

    def metrics(self) -> dict[str, float]:
        """Return the fraction of nonzero numbers that became zero, per part."""
        return {
            f"quantized_to_zero/{part}": self.lost[part] / count
            for part, count in self.counts.items()
            if count
        }

    def _is_packed(self, leaf: Any) -> bool:
        """Return whether a leaf is packed, which depends only on its shape and dtype."""
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return is_float and nbytes(self._packed(leaf)) < nbytes(leaf)

    def _packed(self, tensor: Tensor) -> dict[str, Tensor]:
        codes = empty_codes(tensor.shape, self.bits)
        return {"largest": empty((), tensor.dtype), "codes": codes}
