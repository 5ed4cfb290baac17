"""Quantization of nested data."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flsuite.exchange.base import decode_each, empty, require_finite, require_match
from flsuite.exchange.codes import decode_tensor, empty_codes, encode_tensor, quantize
from flsuite.state import nbytes

__all__ = ["TreeQuantizer"]


class TreeQuantizer:
    """Packs the float tensors of nested dicts, and counts the numbers that become zero.

    Integer tensors and numbers stay as they are, and so do float tensors that codes would not make
    smaller.

    Args:
        bits: Bits per number.

    Attributes:
        counts: Per part, the numbers other than zero.
        lost: Per part, those of them whose code is zero.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.counts: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def encode(self, tree: Any, part: str) -> Any:
        """Return the packed form of finite nested data.

        Args:
            tree: A tensor, a number, or nested dicts of them.
            part: The name that its numbers are counted under.
        """
        if isinstance(tree, Mapping):
            return {key: self.encode(value, part) for key, value in tree.items()}
        if not self._is_packed(tree):
            return tree

        largest = tree.abs().max()
        codes = quantize(tree, largest, self.bits)
        count = int(torch.count_nonzero(tree))
        self.counts[part] += count
        self.lost[part] += count - int(torch.count_nonzero(codes))
        return encode_tensor(codes, largest, self.bits)

    def decode(self, packed: Any, template: Any, name: str) -> Any:
        """Return the data that was packed, in the shapes and dtypes of a template.

        Args:
            packed: What :meth:`encode` returned. It may be anything.
            template: The shapes and dtypes that were packed.
            name: The name of the data, for errors.

        Raises:
            ValueError: If it does not fit the template.
        """
        if isinstance(template, Mapping):
            return decode_each(self.decode, packed, template, name)
        if self._is_packed(template):
            return decode_tensor(packed, template, self.bits, name)

        require_match(packed, template, name)
        require_finite(**{name: packed})
        return packed

    def template(self, template: Any) -> Any:
        """Return the shapes and dtypes of the packed form, if every tensor has negative values."""
        if isinstance(template, Mapping):
            return {key: self.template(value) for key, value in template.items()}
        return self._packed(template) if self._is_packed(template) else template

    def metrics(self) -> dict[str, float]:
        """Return the share of numbers other than zero that became zero, per part."""
        return {
            f"quantized_to_zero/{part}": self.lost[part] / count
            for part, count in self.counts.items()
            if count
        }

    def _is_packed(self, leaf: Any) -> bool:
        """Return whether a leaf is packed. Both sides know it from the shape and the dtype."""
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return is_float and nbytes(self._packed(leaf)) < nbytes(leaf)

    def _packed(self, tensor: Tensor) -> dict[str, Tensor]:
        codes = empty_codes(tensor.shape, self.bits)
        return {"largest": empty((), tensor.dtype), "codes": codes}
